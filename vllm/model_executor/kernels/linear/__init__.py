# SPDX-License-Identifier: Apache-2.0

from vllm.model_executor.kernels.linear import (
    EmulationNvFp4LinearKernel,
    NvFp4LinearKernel,
    NvFp4LinearLayerConfig,
    _get_linear_backend,
)
from vllm.model_executor.kernels.linear.nvfp4.cpu import CPUNvFp4LinearKernel
from vllm.platforms import PlatformEnum, current_platform

# fork: append
_POSSIBLE_NVFP4_KERNELS = {PlatformEnum.CPU: [CPUNvFp4LinearKernel, EmulationNvFp4LinearKernel]}


# fork: edit b7cc5b4f7f70
def init_nvfp4_linear_kernel(use_a16: bool) -> NvFp4LinearKernel:
    # fork: at start
    if current_platform.is_cpu() and (use_a16 or _get_linear_backend() == "auto"):
        return CPUNvFp4LinearKernel(NvFp4LinearLayerConfig())
