# SPDX-License-Identifier: Apache-2.0

import torch

from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase
from vllm.model_executor.layers.quantization.compressed_tensors.names import (
    expert_linears,
)
from vllm.platforms import current_platform


# fork: extend
class CompressedTensorsMoEMethod:
    # fork: edit 20e72af9630a
    def get_moe_method(
        quant_config, layer: torch.nn.Module, layer_name: str, weight_quant
    ) -> FusedMoEMethodBase:
        # fork: instead-of unfused_names
        unfused_names = expert_linears(  # noqa: F841
            layer_name,
            (
                layer.ckpt_gate_proj_name,
                layer.ckpt_up_proj_name,
                layer.ckpt_down_proj_name,
            ),
        )
        # fork: after input_quant
        if quant_config._is_mxfp4(weight_quant) and current_platform.is_cpu():
            from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4MoEMethod

            # Weight-only, whatever the file says of activations.
            return Mxfp4MoEMethod(layer.moe_config)
