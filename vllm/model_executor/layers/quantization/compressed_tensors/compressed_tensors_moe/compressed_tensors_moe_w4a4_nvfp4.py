# SPDX-License-Identifier: Apache-2.0

import torch

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.experts.cpu_nvfp4_moe import (
    DIVISORS,
    check_expert_scales,
    mark_scales_unloaded,
)
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import (
    NvFp4MoeBackend,
    scales_gate_and_up_apart,
)
from vllm.model_executor.layers.quantization.utils.nvfp4_tensor_scale import (
    share_w13_tensor_scale,
)
from vllm.platforms import current_platform


# fork: extend
class CompressedTensorsW4A4Nvfp4MoEMethod:
    # fork: edit 50b9104e57b5
    def create_weights(self, layer: torch.nn.Module):
        # fork: at end
        if current_platform.is_cpu():
            mark_scales_unloaded(layer, DIVISORS)

    # fork: edit 1892f9c28648
    def process_weights_after_loading(
        self, layer: RoutedExperts, w13_weight_global_scale: torch.Tensor, upstream
    ) -> None:
        # fork: at start
        if current_platform.is_cpu():
            check_expert_scales(
                layer,
                activations=self.nvfp4_backend == NvFp4MoeBackend.EMULATION,
                names=DIVISORS,
            )
        # fork: drop if
        # fork: instead-of w13_weight_global_scale
        if scales_gate_and_up_apart(self.nvfp4_backend):
            w13_weight_global_scale = layer.w13_weight_global_scale
        elif self.moe.is_act_and_mul:
            # The largest scale is the smallest divisor.
            w13_weight_global_scale = 1.0 / share_w13_tensor_scale(
                layer.layer_name,
                layer.w13_weight_scale.data,
                1.0 / layer.w13_weight_global_scale,
            )
        else:
            w13_weight_global_scale = upstream
