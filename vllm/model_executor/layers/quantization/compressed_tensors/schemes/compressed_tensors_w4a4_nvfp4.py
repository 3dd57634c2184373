# SPDX-License-Identifier: Apache-2.0

import torch

from vllm.model_executor.layers.quantization.utils.fp4_scales import (
    NVFP4_COMPRESSED,
    finish_linear_scales,
    mark_linear_scales,
)


# fork: extend
class CompressedTensorsW4A4Fp4:
    # fork: edit cbf81870857f
    def create_weights(self, layer: torch.nn.Module):
        # fork: at end
        mark_linear_scales(layer, NVFP4_COMPRESSED)

    # fork: edit a167dea43d4f
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # fork: drop if[0]
        # fork: at start
        finish_linear_scales(layer, NVFP4_COMPRESSED, self.kernel)
