# SPDX-License-Identifier: Apache-2.0
"""Kimi K3 (and Kimi Linear) text model on the CPU platform."""

from vllm.config import VllmConfig
from vllm.models.kimi_k3.amd import linear as portable

# Layers whose ``weight`` other code reads. The CPU GEMM dispatcher would
# otherwise repack it in place (3-D convolution) or empty it (2-D).
_READ_DIRECTLY = (
    "conv1d",
    "kv_b_proj",
    "routed_expert_up_proj",
    "self_attention_res_proj",
    "mlp_res_proj",
    "output_attn_res_proj",
)


class KimiLinearForCausalLM(portable.KimiLinearForCausalLM):
    """The portable model with what the CPU platform cannot do refused early."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        if vllm_config.speculative_config is not None:
            raise ValueError(
                "Kimi K3 on CPU does not support speculative decoding: its KDA "
                "kernels keep one recurrent state per request. Remove "
                "--speculative-config."
            )
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        for name, module in self.named_modules():
            if name.endswith(_READ_DIRECTLY):
                module.reads_weight_directly = True
