from torch import nn

from vllm.checkpoint.fused_modules import use_fused_modules
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.models.kimi_k3.amd.linear import EagleModelMixin
from vllm.platforms import current_platform


# fork: extend
class KimiMoE:
    # fork: edit 193e1476157e
    def __init__(self, moe_intermediate_size):
        # The weights are on the runner's routed experts. Zeroed before loading,
        # the padded part adds nothing, whatever the backend.
        # fork: instead-of if[-3]
        if self.padded_moe_intermediate_size != moe_intermediate_size:
            routed = self.experts.routed_experts
            for bank in ("w13_weight", "w2_weight"):
                for name in (bank, f"{bank}_packed"):
                    if hasattr(routed, name):
                        getattr(routed, name).data.zero_()
            routed.moe_config.intermediate_size_per_partition_unpadded = (
                moe_intermediate_size // self.tp_size
            )


# fork: extend
class KimiDecoderLayer:
    # fork: edit c20f9436fafc
    def __init__(self, upstream):
        # The shared layer has the full-rank gate too, and the CPU kernels.
        # fork: instead-of if[1]
        if upstream and not current_platform.is_cpu():
            ...


# fork: extend bases
class KimiLinearModel(nn.Module, EagleModelMixin, SupportsQuant):
    # fork: edit 8d599ae9a77c
    def __init__(self, vllm_config, config):
        # fork: after self.config
        use_fused_modules(self, config, vllm_config.quant_config)
