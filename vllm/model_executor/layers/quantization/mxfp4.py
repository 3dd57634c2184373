# SPDX-License-Identifier: Apache-2.0

import torch

from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import Mxfp4MoeBackend
from vllm.model_executor.layers.quantization.utils.fp4_expert_scales import (
    finish_expert_scales,
    mark_expert_scales,
)
from vllm.model_executor.layers.quantization.utils.fp4_scales import MXFP4
from vllm.platforms import current_platform


# fork: extend
class Mxfp4Config:
    # fork: edit 6f1b2ddd32c6
    def get_supported_act_dtypes(cls, upstream) -> list[torch.dtype]:
        # fork: instead-of return
        return [*upstream, torch.float32] if current_platform.is_cpu() else upstream


# fork: extend
class Mxfp4MoEMethod:
    # fork: edit 5538a4fdc272
    def create_weights(self, layer: RoutedExperts):
        # fork: at end
        mark_expert_scales(layer, MXFP4)

    # fork: edit 7ee2b081a4b7
    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        # fork: at start
        finish_expert_scales(layer, MXFP4)
        # fork: at end
        if self.mxfp4_backend == Mxfp4MoeBackend.SITU_SM90:
            assert self.moe_kernel is not None
            self.moe_kernel.fused_experts.process_weights_after_loading(layer)
