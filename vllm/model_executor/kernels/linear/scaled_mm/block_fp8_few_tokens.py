# SPDX-License-Identifier: Apache-2.0
"""Block-scaled FP8 weights times few BF16 rows, in one launch.

With few tokens a linear is bound by reading its weight. Quantising the activations
first costs a launch that takes as long as the product; here the weight is widened to
BF16 in registers, which is exact, so that the activations stay as they are.

The reduction over columns is shared among programs where one row of programs would not
fill the card. The last program to finish adds up the parts, in a fixed order: results
do not depend on which one that is.
"""

from dataclasses import dataclass

import torch

from vllm.triton_utils import tl, triton

__all__ = ["FewTokensPlan", "block_fp8_few_tokens", "few_tokens_plan"]

BLOCK = 128
MAX_TOKENS = 64

@dataclass(frozen=True)
class FewTokensPlan:
    """How the kernel cuts its work.

    Attributes:
        tokens: Tokens of the tile, at least those of the input; 16, 32 or 64.
        rows: Weight rows of a program; divides 128.
        split: Programs that share a row tile's columns.
        warps: Warps of a program.
        stages: Depth of the ring of loads.
    """

    tokens: int
    rows: int
    split: int
    warps: int = 4
    stages: int = 4


def few_tokens_plan(
    tokens: int, rows: int, columns: int, multiprocessors: int
) -> FewTokensPlan:
    """Choose a plan: two programs for each multiprocessor, four blocks of columns each.

    Args:
        tokens: Rows of the input, at most 64.
        rows: Rows of the padded weight.
        columns: Columns of the padded weight.
        multiprocessors: Of the card.
    """
    tile = next(size for size in (16, 32, MAX_TOKENS) if size >= tokens)
    height = 64 if tile < 64 else 128
    tiles, blocks = rows // height, columns // BLOCK
    split = min(-(-2 * multiprocessors // tiles), max(1, blocks // 4))
    # Equal shares of the columns: a longer one would finish last.
    split = -(-blocks // -(-blocks // split))
    return FewTokensPlan(tile, height, split, warps=height // 16)


@triton.jit
def _few_tokens_kernel(
    x,
    weight,
    scale,
    out,
    parts,
    arrivals,
    tokens,
    x_stride,
    ROWS_TOTAL: tl.constexpr,
    BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    ROWS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
):
    tile = tl.program_id(0)
    share = tl.program_id(1)
    row = tile * ROWS + tl.arange(0, ROWS)
    token = tl.arange(0, TOKENS)
    column = tl.arange(0, 128)
    COLUMNS: tl.constexpr = BLOCKS * 128
    SHARE: tl.constexpr = (BLOCKS + SPLIT - 1) // SPLIT
    first = share * SHARE
    w_at = weight + row[:, None].to(tl.int64) * COLUMNS + column[None, :]
    x_at = x + token[None, :].to(tl.int64) * x_stride + column[:, None]
    s_at = scale + (tile * ROWS // 128) * BLOCKS
    total = tl.zeros((ROWS, TOKENS), tl.float32)
    for block in tl.range(first, min(first + SHARE, BLOCKS), num_stages=STAGES):
        codes = tl.load(w_at + block * 128)
        inputs = tl.load(x_at + block * 128, mask=token[None, :] < tokens, other=0.0)
        if PACKED:
            # Four codes to BF16: sign and magnitude move to BF16's places, which
            # divides by 2^120, and a product with 2^120 puts that right, subnormals
            # included. Each step is exact. The code for NaN would become 480; loading
            # refuses it.
            w = tl.inline_asm_elementwise(
                """
                {
                    .reg .b32 lo, hi, sign, up;
                    mov.b32 up, 0x7B807B80;
                    prmt.b32 lo, $2, 0, 0x1404;
                    prmt.b32 hi, $2, 0, 0x3424;
                    and.b32 sign, lo, 0x80008000;
                    shr.u32 lo, lo, 4;
                    and.b32 lo, lo, 0x07F007F0;
                    or.b32 lo, lo, sign;
                    mul.bf16x2 $0, lo, up;
                    and.b32 sign, hi, 0x80008000;
                    shr.u32 hi, hi, 4;
                    and.b32 hi, hi, 0x07F007F0;
                    or.b32 hi, hi, sign;
                    mul.bf16x2 $1, hi, up;
                }
                """,
                "=r,=r,r",
                [codes],
                dtype=tl.bfloat16,
                is_pure=True,
                pack=4,
            )
        else:
            bits = codes.to(tl.int32)  # the same steps, in float32
            bits = ((bits & 0x80) << 24) | ((bits & 0x7F) << 20)
            w = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
            inputs = inputs.to(tl.float32)
        total += tl.dot(w, inputs) * tl.load(s_at + block)

    last = True
    if SPLIT > 1:
        PART: tl.constexpr = ROWS * TOKENS
        within = tl.arange(0, ROWS)[:, None] * TOKENS + token[None, :]
        mine = parts + (tile * SPLIT + share).to(tl.int64) * PART
        tl.store(mine + within, total)
        tl.debug_barrier()  # every thread's part is written before the arrival counts
        last = tl.atomic_add(arrivals + tile, 1, sem="acq_rel") == SPLIT - 1
        if last:
            total = tl.zeros((ROWS, TOKENS), tl.float32)
            for other in range(SPLIT):
                part = parts + (tile * SPLIT + other).to(tl.int64) * PART
                total += tl.load(part + within, cache_modifier=".cg")
            tl.store(arrivals + tile, 0)
    if last:
        at = out + token[None, :].to(tl.int64) * ROWS_TOTAL + row[:, None]
        tl.store(at, total.to(out.dtype.element_ty), mask=token[None, :] < tokens)


def block_fp8_few_tokens(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    arrivals: torch.Tensor,
    plan: FewTokensPlan,
    packed: bool = True,
) -> torch.Tensor:
    """Return ``x @ dequantised(weight).T``, summed in float32.

    Args:
        x: bf16 ``[tokens, columns]``, at most ``plan.tokens`` rows, each contiguous.
        weight: e4m3 ``[rows, columns]``, both multiples of 128, without NaN.
        scale: float32 ``[rows / 128, columns / 128]``, multipliers.
        arrivals: int32, zeros, at least ``rows / plan.rows`` long; zeros again
            afterwards. Calls that may run at the same time need one each.
        plan: See :func:`few_tokens_plan`.
        packed: Whether to widen two codes at a time, in PTX for compute capability
            9.0; otherwise one by one and to float32, as Triton's interpreter can.

    Returns:
        bf16 ``[tokens, rows]``.
    """
    tokens, columns = x.shape
    rows = weight.shape[0]
    assert tokens <= plan.tokens and x.stride(1) == 1
    assert weight.shape == (rows, columns) and rows % BLOCK == columns % BLOCK == 0
    out = x.new_empty(tokens, rows)
    if tokens == 0:
        return out
    tiles = rows // plan.rows
    assert arrivals.numel() >= tiles
    size = tiles * plan.split * plan.rows * plan.tokens if plan.split > 1 else 1
    parts = torch.empty(size, dtype=torch.float32, device=x.device)
    _few_tokens_kernel[(tiles, plan.split)](
        x,
        weight.view(torch.uint8),
        scale,
        out,
        parts,
        arrivals,
        tokens,
        x.stride(0),
        ROWS_TOTAL=rows,
        BLOCKS=columns // BLOCK,
        TOKENS=plan.tokens,
        ROWS=plan.rows,
        SPLIT=plan.split,
        STAGES=plan.stages,
        PACKED=packed,
        num_warps=plan.warps,
    )
    return out
