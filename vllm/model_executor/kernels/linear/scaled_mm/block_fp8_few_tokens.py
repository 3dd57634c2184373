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
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm.utils import nvrtc

__all__ = [
    "BLOCK",
    "MAX_TOKENS",
    "FewTokensPlan",
    "block_fp8_few_tokens",
    "clusters_at_once",
    "few_tokens_plan",
    "prepare_kernels",
]

BLOCK = 128
MAX_TOKENS = 64

_SOURCE = Path(__file__).with_suffix(".cu")
_THREADS = 384
_STAGES = 6  # blocks of 128 columns in shared memory at a time; even
_CLUSTER = 8  # blocks at most, wherever the card has room
_FIXED = 12  # time of a launch over that of a block of columns, about
_WIDTHS = (8, 16, 32, 64)


@dataclass(frozen=True)
class FewTokensPlan:
    """How the kernel cuts its work.

    Attributes:
        width: Tokens of a tile, at least those of the input: 8, 16, 32 or 64.
        split: Blocks of threads that share the columns, a cluster.
        share: Blocks of 128 columns each of them multiplies, at most.
    """

    width: int
    split: int
    share: int

    @property
    def shared(self) -> int:
        """Dynamic shared memory of a block, bytes."""
        ring = _STAGES * (BLOCK * BLOCK + 2 * BLOCK * self.width + 16)
        sums = -(-self.width // self.split) * self.split * 512
        return 1024 + ring + 8 + 4 * self.share + 16 + sums


@functools.cache
def few_tokens_plan(tokens: int, rows: int, columns: int, clusters: tuple[int, ...]) -> FewTokensPlan:
    """Choose how many blocks share the columns: the more, the shorter, if all run at once.

    Args:
        tokens: Rows of the input, at most 64.
        rows: Rows of the padded weight.
        columns: Columns of the padded weight.
        clusters: How many clusters of 1, 2, … blocks the card holds at a time.
    """
    width = next(w for w in _WIDTHS if w >= tokens)
    blocks, groups = columns // BLOCK, rows // BLOCK
    times = {}
    for split, at_once in enumerate(clusters, 1):
        plan = FewTokensPlan(width, split, -(-blocks // split))
        if (split - 1) * plan.share >= blocks or plan.shared > nvrtc.SHARED_LIMIT:
            continue  # nothing is left for the last
        waves = -(-groups // at_once)
        times[plan] = waves * (plan.share + plan.share % 2 + _FIXED)
    return min(times, key=times.__getitem__)


def _source(width: int) -> str:
    return nvrtc.source(_SOURCE, {width}, {"TOKENS": width, "STAGES": _STAGES})


@nvrtc.per_device
def _kernel(width: int) -> nvrtc.Kernel:
    code = nvrtc.machine_code(_source(width), _SOURCE.name)
    return nvrtc.Kernel(code, "block_fp8_few_tokens", nvrtc.SHARED_LIMIT)


@nvrtc.per_device
def prepare_kernels() -> None:
    """Compile and load what :func:`block_fp8_few_tokens` may run, for the current device.

    A CUDA graph cannot be captured while a kernel is loaded for the first time.
    """
    device = torch.cuda.current_device()

    def load(width: int) -> None:
        with torch.cuda.device(device):
            _kernel(width)

    with ThreadPoolExecutor(len(_WIDTHS)) as pool:
        list(pool.map(load, _WIDTHS))
    clusters_at_once()


@nvrtc.per_device
def clusters_at_once() -> tuple[int, ...]:
    """How many clusters of 1 to 8 blocks run at a time on the current device.

    A cluster stays within a GPC, whose number of multiprocessors differs from card to card.
    """
    width = _WIDTHS[-1]
    kernel, shared = _kernel(width), FewTokensPlan(width, 1, 1).shared
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    larger = (kernel.clusters(_THREADS, shared, size) for size in range(2, _CLUSTER + 1))
    return device.multi_processor_count, *larger


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
    plan = plan or few_tokens_plan(tokens, rows, columns, clusters_at_once())
    _kernel(plan.width)(
        (rows // BLOCK, plan.split), _THREADS, plan.shared,
        weight, scale, x, out, tokens, x.stride(0), columns // BLOCK, plan.share,
        early=True, cluster=plan.split,
    )  # fmt: skip
    return out
