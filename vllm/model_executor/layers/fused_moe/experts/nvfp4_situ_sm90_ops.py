# SPDX-License-Identifier: Apache-2.0
"""One layer of NVFP4 SiTU experts on SM90: route, two GEMMs, reduce.

Four launches, five for many tokens. Grids depend on shapes alone and nothing is read
back, so CUDA graphs capture them. Results do not vary from run to run: sums are made
in a fixed order, routing weights and choices included.
"""

import functools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from vllm.model_executor.layers.fused_moe.experts.nvfp4_situ_sm90_kernels import (
    SHARED_LIMIT,
    Kernel,
    gemm_kernel,
    machine_code,
    reduce_kernel,
    route_kernel,
)
from vllm.model_executor.layers.fused_moe.experts.nvfp4_situ_sm90_layout import COLUMNS

__all__ = [
    "Plan",
    "nvfp4_situ_moe",
    "plan_for",
    "prepare_kernels",
    "workspace_sizes",
]

_STEP_BYTES = 1152  # 16 rows x 128 columns: codes and scales
_COPIERS = 4  # warps that copy, in the large kernel
_LISTS = 8  # counters of items
_ROUTE_PAIRS = 2048  # what one block of the router should have to sort at most


@dataclass(frozen=True)
class Plan:
    """Which GEMM kernel runs, and its constants.

    Attributes:
        tokens: Tokens of one expert multiplied together; a longer list is cut.
        large: Whether by wgmma over blocks of 256 rows, or by row tiles of 16.
        stages: Depth of the ring of copies, 0 for as deep as shared memory allows.
        narrower: Further widths, descending, for lists with fewer tokens (large only).
        pair: Blocks of columns per group of products (large only).
        rows: Row tiles a warp takes at once (small only).
        warps: Warps per block (small only).
        blocks: Blocks per multiprocessor (small only).
        split: Warps that share a row tile's columns (small only).
        held: Tokens in shared memory at a time, 0 for as many as fit (small only).
    """

    tokens: int
    large: bool = False
    stages: int = 0
    narrower: tuple[int, ...] = ()
    pair: int = 2
    rows: int = 1
    warps: int = 16
    blocks: int = 1
    split: int = 4
    held: int = 0

    @property
    def widths(self) -> tuple[int, ...]:
        """Tokens of one expert that the kernel multiplies together, descending."""
        return self.tokens, *self.narrower

    def macros(self, phase: int, chunks: int) -> tuple[dict[str, int | str], int]:
        """Macros of the kernel for a matrix of ``chunks`` * 128 columns, shared bytes."""
        if self.large:
            chunk = self.tokens * COLUMNS * 2 + 16 * _STEP_BYTES
            extra = 4 * 4 * self.tokens if phase == 1 else 16 * 1024
            room = SHARED_LIMIT - 4096 - 1024 - 16 * 8 - extra
            # Two chunks a stage save barriers, where that leaves a stage to each copying warp.
            span = 2 if chunks % 2 == 0 and room >= 2 * _COPIERS * chunk else 1
            stages = self.stages or min(8, room // (span * chunk))
            return {
                "KERNEL_LARGE": 1,
                "PHASE": phase,
                "TOKENS": self.tokens,
                "WIDTHS": ",".join(map(str, self.widths)),
                "PAIR": self.pair,
                "STAGES": stages,
                "SPAN": span,
            }, stages * span * chunk + extra + 1024 + 16 * stages
        split = self.split if chunks >= 2 * self.split else 1
        limit = SHARED_LIMIT // self.blocks - 4096
        row = chunks * COLUMNS * 2 + 16
        step = self.warps * self.rows * _STEP_BYTES
        tiles = self.tokens // 8
        sums = 2 * self.warps * self.rows * tiles * 512 if split > 1 else 0
        held = self.held or max(
            self.tokens, min(64, 2 * self.tokens, (limit - sums - 5 * step) // row)
        )
        stages = self.stages or min(8, (limit - sums - held * row) // step)
        return {
            "KERNEL_SMALL": 1,
            "PHASE": phase,
            "TILES": tiles,
            "ROWS": self.rows,
            "WARPS": self.warps,
            "STAGES": stages,
            "BLOCKS": self.blocks,
            "SPLIT": split,
            "TOKEN_ROWS": held,
        }, held * row + stages * step + sums

    def gemm(self, phase: int, chunks: int) -> tuple[Kernel, int, int, int]:
        """The kernel, blocks per multiprocessor, threads per block, shared bytes."""
        macros, shared = self.macros(phase, chunks)
        threads = 640 if self.large else self.warps * 32
        return gemm_kernel(**macros), 1 if self.large else self.blocks, threads, shared


# Up to a mean number of tokens per expert: the plan.
_PLANS = (
    (1, Plan(tokens=8, rows=2, split=4)),
    (1.8, Plan(tokens=8, rows=2, split=1)),
    (5.5, Plan(tokens=16, narrower=(8,), large=True, pair=4)),
    (12, Plan(tokens=24, narrower=(16,), large=True, pair=4)),
    (21, Plan(tokens=32, narrower=(24, 16), large=True, pair=4)),
    (42, Plan(tokens=56, narrower=(48, 40, 32), large=True)),
    (float("inf"), Plan(tokens=96, narrower=(88, 80, 72, 64), large=True)),
)


def plan_for(tokens: int, choices: int, experts: int) -> Plan:
    """Choose by the mean number of tokens an expert of the model receives.

    Bounds between the kinds are where their measured times cross on an H200
    (``docs/hopper-notes.md``).

    Args:
        tokens: Tokens of this call.
        choices: Experts each token chose (top-k).
        experts: Experts in the model, on all ranks.
    """
    mean = tokens * choices / max(experts, 1)
    return next(plan for most, plan in _PLANS if mean <= most)


def workspace_sizes(pairs: int, width: int, hidden: int) -> tuple[int, int]:
    """Elements (bf16) of the activation and of the second GEMM's rows."""
    return pairs * (width + -width % COLUMNS), pairs * hidden


def _reduce_threads(hidden: int) -> int:
    return min(512, -(-hidden // 8 // 32) * 32)


@functools.cache
def prepare_kernels(device: int, hidden: int, width: int) -> None:
    """Compile and load every kernel that a layer of this shape can call.

    A first use may happen while a CUDA graph is captured, when loading is not allowed.
    The first time on a machine this takes seconds, then the code comes from disk.

    Args:
        device: Index of the CUDA device.
        hidden: Columns of the layer's input.
        width: A rank's expert width.
    """
    chunks = hidden // COLUMNS, -(-width // COLUMNS)
    gemms = [p.macros(i + 1, n)[0] for _, p in _PLANS for i, n in enumerate(chunks)]
    threads = _reduce_threads(hidden)
    others = [{"KERNEL_ROUTE": 1, "PART": part} for part in range(3)]
    others.append({"KERNEL_REDUCE": 1, "THREADS": threads})
    with ThreadPoolExecutor(8) as pool:  # the compiler works outside of Python's lock
        list(pool.map(lambda macros: machine_code(**macros), [*gemms, *others]))
    with torch.cuda.device(device):
        for macros in gemms:
            gemm_kernel(**macros)
        for part in range(3):
            route_kernel(part)
        reduce_kernel(threads)


def nvfp4_situ_moe(
    out: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_alphas: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_alphas: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    global_experts: int,
    beta: float,
    linear_beta: float | None,
    activation: torch.Tensor | None = None,
    rows: torch.Tensor | None = None,
    plan: Plan | None = None,
    plan2: Plan | None = None,
    early: bool = True,
) -> None:
    """Compute ``out[m] = sum_k p_mk * w2 @ situ(w1 @ x[m], w3 @ x[m])``.

    Args:
        out: bf16 ``[tokens, hidden]``.
        x: bf16 ``[tokens, hidden]``, contiguous.
        w13: Packed ``[gate | up]``, see ``nvfp4_situ_sm90_layout``.
        w13_scale: Its packed block scales.
        w13_alphas: Tensor scales of gate and up, float32 ``[experts, 2]``.
        w2: Packed down projection.
        w2_scale: Its packed block scales.
        w2_alphas: Tensor scales, float32 ``[experts]``.
        topk_weights: float32 ``[tokens, choices]``.
        topk_ids: int32 or int64 ``[tokens, choices]``; a negative id, or one that
            maps to a negative one, adds nothing.
        expert_map: int32, global to local expert, or None where they are the same.
        global_experts: Experts on all ranks (chooses the kernel, no more).
        beta: SiTU's limit of the gate.
        linear_beta: SiTU's limit of the other half, or None.
        activation: bf16 scratch, see :func:`workspace_sizes`.
        rows: bf16 scratch, see :func:`workspace_sizes`.
        plan: Kernel of the first GEMM; chosen by shape if None.
        plan2: Kernel of the second GEMM; like the first if None.
        early: Let each kernel start while the one in front ends.
    """
    tokens, hidden = x.shape
    choices = topk_ids.shape[1]
    pairs = tokens * choices
    if pairs == 0:
        return
    experts = w13.shape[0]
    row_tiles, chunks = w13.shape[1], w13.shape[2] // 1024
    width, down_tiles, down_chunks = row_tiles * 8, w2.shape[1], w2.shape[2] // 1024
    assert x.dtype == out.dtype == torch.bfloat16
    assert x.is_contiguous() and out.is_contiguous() and topk_ids.is_contiguous()
    assert topk_weights.is_contiguous() and topk_weights.dtype == torch.float32
    assert w13_alphas.shape == (experts, 2) and w13_alphas.is_contiguous()
    assert w13_alphas.dtype == w2_alphas.dtype == torch.float32
    assert expert_map is None or expert_map.dtype == torch.int32
    assert chunks * COLUMNS == hidden == down_tiles * 16
    assert down_chunks * COLUMNS == width
    plan = plan or plan_for(tokens, choices, global_experts)
    plan2 = plan2 or plan
    assert (plan2.widths, plan2.large) == (plan.widths, plan.large)
    assert len(plan.widths) < _LISTS and w2_alphas.is_contiguous()
    sizes = workspace_sizes(pairs, width, hidden)
    if activation is None:
        activation = torch.empty(sizes[0], dtype=x.dtype, device=x.device)
    if rows is None:
        rows = torch.empty(sizes[1], dtype=x.dtype, device=x.device)

    # Items are cut experts: at most one per expert or pair, and one per full cut. They come
    # in one list a width.
    most_items = min(pairs, experts) + pairs // plan.tokens
    widths = sum(width // 8 << 4 * i for i, width in enumerate(plan.widths))
    blocks = min(32, -(-pairs // _ROUTE_PAIRS))
    parts = (pairs, 4 * most_items * len(plan.widths), _LISTS, pairs, blocks * experts)
    scratch = torch.empty(
        sum(n + -n % 4 for n in parts), dtype=torch.int32, device=x.device
    )
    slots, items, count, ranks, counts = scratch.split([n + -n % 4 for n in parts])
    wide = int(topk_ids.dtype == torch.int64)
    mapped = 0 if expert_map is None else expert_map.numel()
    natural = x
    if plan.large:
        x = torch.empty_like(natural)
    for part in (0,) if blocks == 1 else (1, 2):
        route_kernel(part)(
            (blocks + (128 if plan.large and part < 2 else 0), 1),
            1024,
            experts * 4,
            topk_ids,
            expert_map,
            slots,
            items,
            count,
            ranks,
            counts,
            natural,
            x,
            tokens * hidden // 2,
            blocks,
            wide,
            mapped,
            experts,
            pairs,
            widths,
            most_items,
        )
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count
    for phase, chosen, operands in (
        (1, plan, (w13, w13_scale, w13_alphas, x)),
        (2, plan2, (w2, w2_scale, w2_alphas, activation)),
    ):
        kernel, blocks, threads, shared = chosen.gemm(
            phase, chunks if phase == 1 else down_chunks
        )
        kernel(
            (processors * blocks, 1),
            threads,
            shared,
            *operands,
            slots,
            items,
            count,
            activation if phase == 1 else rows,
            row_tiles if phase == 1 else down_tiles,
            chunks if phase == 1 else down_chunks,
            choices,
            width if phase == 1 else hidden,
            float(beta),
            float(linear_beta or 0.0),
            pairs,
            most_items,
            early=early,
        )
    threads = _reduce_threads(hidden)
    reduce_kernel(threads)(
        (tokens, 1),
        threads,
        choices * 4,
        rows,
        topk_ids,
        expert_map,
        topk_weights,
        w2_alphas,
        out,
        wide,
        mapped,
        experts,
        choices,
        hidden,
        early=early,
    )
