# SPDX-License-Identifier: Apache-2.0

import torch

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.utils.fp4_expert_scales import (
    finish_expert_scales,
    mark_expert_scales,
)
from vllm.model_executor.layers.quantization.utils.fp4_scales import MXFP4


# fork: extend
class CompressedTensorsW4A4Mxfp4MoEMethod:
    # fork: edit 6c196c368fa7
    def create_weights(self, layer: torch.nn.Module):
        # fork: at end
        mark_expert_scales(layer, MXFP4)

    # fork: edit 51a7613ac9c7
    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        # fork: at start
        finish_expert_scales(layer, MXFP4)
