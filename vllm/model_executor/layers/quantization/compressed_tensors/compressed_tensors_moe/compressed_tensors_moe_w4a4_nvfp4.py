# SPDX-License-Identifier: Apache-2.0

import torch

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import (
    scales_gate_and_up_apart,
)
from vllm.model_executor.layers.quantization.utils.fp4_expert_scales import (
    finish_expert_scales,
    mark_expert_scales,
    quantizes_activations,
)
from vllm.model_executor.layers.quantization.utils.fp4_scales import NVFP4_COMPRESSED
from vllm.model_executor.layers.quantization.utils.nvfp4_tensor_scale import (
    share_w13_tensor_scale,
)


# fork: extend
class CompressedTensorsW4A4Nvfp4MoEMethod:
    # fork: edit d4ee30b2efbd
    def __init__(self, use_a16: bool):
        # fork: at end
        self.use_a16 = use_a16

    # fork: edit 50b9104e57b5
    def create_weights(self, layer: torch.nn.Module):
        # fork: at end
        mark_expert_scales(layer, NVFP4_COMPRESSED)

    # fork: edit 1892f9c28648
    def process_weights_after_loading(
        self, layer: RoutedExperts, w13_weight_global_scale: torch.Tensor, upstream
    ) -> None:
        # fork: at start
        activations = quantizes_activations(self.nvfp4_backend, self.use_a16)
        finish_expert_scales(layer, NVFP4_COMPRESSED, activations)
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
