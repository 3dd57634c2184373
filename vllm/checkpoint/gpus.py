# SPDX-License-Identifier: Apache-2.0
"""GPUs by name: their memory, and the kernels that the engine chooses there for Kimi K3."""

from dataclasses import dataclass

__all__ = ["GPUS", "Gpu", "kernel"]


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        mib: Memory as ``nvidia-smi`` gives it.
        capability: Compute capability times ten.
    """

    mib: int
    capability: int


GPUS = {
    "a100-80gb": Gpu(81920, 80),
    "h100": Gpu(81559, 90),
    "h200": Gpu(143771, 90),
    "b200": Gpu(183359, 100),
    "gb200": Gpu(189471, 100),
}

# Layout -> (from this capability on, kernel), the first that fits. What is tried, in its
# order, less what refuses SiTU or the GPU; FlashInfer and DeepGEMM as the wheel brings them.
_KERNELS = {
    "NVFP4": ((100, "FLASHINFER_TRTLLM"), (90, "SITU_SM90"), (75, "MARLIN")),
    "MXFP4": ((100, "FLASHINFER_TRTLLM_MXFP4_MXFP8"), (90, "SITU_SM90"), (75, "MARLIN")),
    "FP8": (
        (100, "DeepGemmFp8BlockScaledMMKernel"),
        (90, "HopperFp8BlockScaledMMKernel"),
    ),
    "unquantised": ((0, "torch"),),
}


def kernel(algo: str | None, gpu: Gpu) -> str:
    """The engine's kernel for a format of `formats.dialects`, or ``"unknown"``."""
    for layout, choices in _KERNELS.items():
        if layout in (algo or "unquantised"):
            return next((name for least, name in choices if gpu.capability >= least), "none")
    return "unknown"
