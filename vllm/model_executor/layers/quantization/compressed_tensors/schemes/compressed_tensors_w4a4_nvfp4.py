# SPDX-License-Identifier: Apache-2.0

import torch

from vllm.model_executor.kernels.linear.nvfp4.cpu import (
    CPUNvFp4LinearKernel,
    check_linear_scales,
    mark_linear_unloaded,
)
from vllm.platforms import current_platform


# fork: extend
class CompressedTensorsW4A4Fp4:
    # fork: edit cbf81870857f
    def create_weights(self, layer: torch.nn.Module):
        # fork: at end
        if current_platform.is_cpu():
            mark_linear_unloaded(layer, _scales(layer))

    # fork: edit a167dea43d4f
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # fork: at start
        if current_platform.is_cpu():
            weight_only = isinstance(self.kernel, CPUNvFp4LinearKernel)
            check_linear_scales(layer, not weight_only, _scales(layer))
            # Divisors, one per shard, for the kernel that scales them apart.
            layer.weight_shard_scale = 1.0 / layer.weight_shard_scale


def _scales(layer: torch.nn.Module) -> tuple[str, ...]:
    """Names of the tensor scales; a weight-only scheme has none for the input."""
    names = ("weight_global_scale", "input_global_scale")
    return tuple(name for name in names if hasattr(layer, name))
