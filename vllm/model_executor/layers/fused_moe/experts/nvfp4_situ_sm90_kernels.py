# SPDX-License-Identifier: Apache-2.0
"""The kernels of ``nvfp4_situ_sm90.cu``, each compiled at first use."""

from pathlib import Path

from vllm.utils import nvrtc
from vllm.utils.nvrtc import SHARED_LIMIT, Kernel, per_device

__all__ = ["gemm_kernel", "machine_code", "reduce_kernel", "route_kernel", "source"]

_SOURCE = Path(__file__).with_name("nvfp4_situ_sm90.cu")


def _entry(macros: dict[str, int | str]) -> str:
    """Name of the kernel, as a profiler shows it."""
    kind = next(x for x in macros if x.startswith("KERNEL_"))
    phase = f"_{macros['PHASE']}" if "PHASE" in macros else ""
    return f"nvfp4_situ_{kind.removeprefix('KERNEL_').lower()}{phase}"


def source(**macros: int | str) -> str:
    """The text of one kernel, its macros defined at the top."""
    widths = {int(n) for n in str(macros.get("WIDTHS", "")).split(",") if n}
    return nvrtc.source(_SOURCE, widths, {**macros, "ENTRY": _entry(macros)})


def machine_code(**macros: int | str) -> bytes:
    """Compiled code of one kernel."""
    return nvrtc.machine_code(source(**macros), _SOURCE.name)


def _kernel(shared: int, **macros: int | str) -> Kernel:
    return Kernel(machine_code(**macros), _entry(macros), shared)


@per_device
def route_kernel(part: int) -> Kernel:
    return _kernel(SHARED_LIMIT // 2, KERNEL_ROUTE=1, PART=part)


@per_device
def reduce_kernel(threads: int) -> Kernel:
    return _kernel(16384, KERNEL_REDUCE=1, THREADS=threads)


@per_device
def gemm_kernel(**macros: int | str) -> Kernel:
    return _kernel(SHARED_LIMIT // int(macros.get("BLOCKS", 1)) - 4096, **macros)
