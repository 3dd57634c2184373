# SPDX-License-Identifier: Apache-2.0
"""Block-scaled FP8 weights times few BF16 rows on SM90, in one launch.

With few tokens a linear is bound by reading its weight. Quantising the activations
first costs a launch that takes as long as the product; here the weight is widened to
BF16 in registers, which is exact, so that the activations stay as they are. The kernel
is ``block_fp8_few_tokens.cu``.

The reduction over columns is shared among the blocks of a cluster where one row of
blocks would not fill the card; they add up their parts in a fixed order.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vllm.utils import nvrtc

__all__ = [
    "BLOCK",
    "MAX_TOKENS",
    "FewTokensPlan",
    "block_fp8_few_tokens",
    "few_tokens_plan",
    "prepare_kernels",
]

BLOCK = 128
MAX_TOKENS = 64

_SOURCE = Path(__file__).with_suffix(".cu")
_CLUSTER = 8  # blocks at most, wherever the card has room
_FIXED = 4  # time of a launch over that of a block of columns, about
_BESIDE = 1.3  # time of a block of columns beside another block of threads, over alone


@dataclass(frozen=True)
class FewTokensPlan:
    """How the kernel cuts its work.

    Attributes:
        width: Tokens of a tile, at least those of the input: 8, 16, 32 or 64.
        share: Blocks of 128 columns that a block of threads multiplies.
        ahead: Of these, how many are on their way from memory; even.
        resident: Blocks of threads a multiprocessor holds at a time.
        ring: Whether four warps of their own bring the tokens, block of columns by
            block of columns; otherwise all warps first bring those of the share.
        batch: Otherwise: pieces of tokens a warp has on their way to shared memory.
    """

    width: int
    share: int = 1
    ahead: int = 2
    resident: int = 2
    ring: bool = False
    batch: int = 4

    @property
    def shared(self) -> int:
        """Dynamic shared memory of a block, bytes."""
        held = 4 if self.ring else -(-self.share // self.ahead) * self.ahead
        return 1024 + 64 + held * 2 * self.width * 128

    @property
    def threads(self) -> int:
        return 384 if self.ring else 256

    def macros(self) -> dict[str, int]:
        return {
            "TOKENS": self.width,
            "AHEAD": self.ahead,
            "PER_SM": self.resident,
            "RING": int(self.ring),
            "BATCH": self.batch,
        }


# Registers decide: 128 each with two resident blocks of 256 threads.
_PLANS = (
    FewTokensPlan(8),
    FewTokensPlan(16),
    FewTokensPlan(32, resident=1, ring=True),
    FewTokensPlan(64, resident=1, ring=True),
)


def _room(resident: int) -> int:
    return nvrtc.SHARED_LIMIT // resident - 2048


def _clusters_apart(split: int, multiprocessors: int) -> int:
    """Clusters of ``split`` blocks that find a multiprocessor for each block.

    A cluster cannot leave its GPC, of 16 or 18 multiprocessors (how many of each is what
    an H200's 132 and the measured times agree with).
    """
    gpcs = multiprocessors // 16
    larger = (multiprocessors - 16 * gpcs) // 2
    return (gpcs - larger) * (16 // split) + larger * (18 // split)


@functools.cache
def few_tokens_plan(
    tokens: int, rows: int, columns: int, multiprocessors: int
) -> FewTokensPlan:
    """Choose how many blocks share the columns: the more, the shorter, if all run at once.

    Args:
        tokens: Rows of the input, at most 64.
        rows: Rows of the padded weight.
        columns: Columns of the padded weight.
        multiprocessors: Of the card.
    """
    kind = next(p for p in _PLANS if p.width >= tokens)
    blocks, groups = columns // BLOCK, rows // BLOCK
    times = {}
    for split in range(1, min(_CLUSTER, blocks) + 1):
        plan = replace(kind, share=-(-blocks // split))
        if plan.shared > _room(plan.resident):
            continue
        layers = -(-groups // _clusters_apart(split, multiprocessors))
        waves = -(-layers // plan.resident)
        columns_time: float = -(-plan.share // plan.ahead) * plan.ahead
        if layers > 1 and plan.resident > 1:
            columns_time *= _BESIDE
        times[plan] = waves * (columns_time + _FIXED)
    return min(times, key=times.__getitem__)


def _source(macros: dict[str, int]) -> str:
    return nvrtc.source(_SOURCE, {macros["TOKENS"]}, dict(macros))


@nvrtc.per_device
def _kernel(**macros: int) -> nvrtc.Kernel:
    code = nvrtc.machine_code(_source(macros), _SOURCE.name)
    return nvrtc.Kernel(code, "block_fp8_few_tokens", _room(macros["PER_SM"]))


@nvrtc.per_device
def prepare_kernels() -> None:
    """Compile and load what :func:`few_tokens_plan` may choose, for the current device.

    A CUDA graph cannot be captured while a kernel is loaded for the first time.
    """
    device = torch.cuda.current_device()

    def load(plan: FewTokensPlan) -> None:
        with torch.cuda.device(device):
            _kernel(**plan.macros())

    with ThreadPoolExecutor(len(_PLANS)) as pool:
        list(pool.map(load, _PLANS))


@functools.cache
def _multiprocessors(device: int) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def block_fp8_few_tokens(
    x: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    plan: FewTokensPlan | None = None,
) -> torch.Tensor:
    """Return ``x @ dequantised(weight).T``, summed in float32.

    Args:
        x: bf16 ``[tokens, columns]``, at most 64 rows.
        weight: e4m3 ``[rows, columns]``, both multiples of 128, without NaN. It is read
            while the kernel in front on the stream may still run, so that one must
            not write it.
        scale: float32 ``[rows / 128, columns / 128]``, multipliers.
        plan: In place of that of :func:`few_tokens_plan`.

    Returns:
        bf16 ``[tokens, rows]``.
    """
    (tokens, columns), rows = x.shape, weight.shape[0]
    assert weight.shape == (rows, columns) and rows % BLOCK == columns % BLOCK == 0
    assert weight.is_contiguous() and scale.is_contiguous()
    assert x.dtype == torch.bfloat16 and scale.dtype == torch.float32
    out = x.new_empty(tokens, rows)
    if tokens == 0:
        return out
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.contiguous()  # the kernel reads 16 bytes at a time
    plan = plan or few_tokens_plan(tokens, rows, columns, _multiprocessors(x.device.index))
    blocks = columns // BLOCK
    split = -(-blocks // plan.share)
    _kernel(**plan.macros())(
        (rows // BLOCK, split), plan.threads, plan.shared,
        weight, scale, x, out, tokens, x.stride(0), blocks, plan.share,
        early=True, cluster=split,
    )  # fmt: skip
    return out
