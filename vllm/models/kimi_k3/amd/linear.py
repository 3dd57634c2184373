from torch import nn

from vllm.checkpoint.fused_modules import fused_modules_of, stacked_params, use_fused_modules
from vllm.model_executor.layers.divisible import check_divisible
from vllm.model_executor.layers.fused_moe.expert_mapping import entries_by_expert
from vllm.model_executor.models.interfaces import SupportsQuant
from vllm.models.kimi_k3.amd.linear import EagleModelMixin, is_pp_missing_parameter
from vllm.models.kimi_k3.common.cache_scales import cache_scale_name
from vllm.models.kimi_k3.common.expert_names import use_file_names
from vllm.models.kimi_k3.common.expert_padding import zero_padded_experts
from vllm.models.kimi_k3.common.expert_width import rank_expert_width
from vllm.models.kimi_k3.common.parameters import Parameters
from vllm.platforms import current_platform


# fork: extend
class KimiMoE:
    # fork: edit 193e1476157e
    def __init__(self, moe_intermediate_size, min_moe_intermediate_per_partition):
        # fork: instead-of if[0]
        width = rank_expert_width(
            moe_intermediate_size, min_moe_intermediate_per_partition
        )
        self.padded_moe_intermediate_size = width.total
        # fork: instead-of if[-3]
        if width.padded:
            zero_padded_experts(self.experts, width.logical)
        # fork: at end
        use_file_names(self.experts)


# fork: extend
class KimiMLAAttention:
    # fork: edit 5006c0413599
    def __init__(self, num_heads: int, prefix: str, tp_size: int):
        # fork: after tp_size
        check_divisible(prefix, "heads", [num_heads], tp_size)


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

    # fork: edit ebfdbdaf41a5
    def load_weights(
        self, stacked_params_mapping, expert_params_mapping, name, params_dict
    ):
        # fork: drop kda_config
        # fork: drop use_full_rank_gate
        # fork: drop beta_shard_id
        # fork: drop if[0]
        # fork: drop if[1]
        # fork: instead-of stacked_params_mapping[0]
        stacked_params_mapping = stacked_params(fused_modules_of(self.config))
        # fork: after params_dict
        params_dict = Parameters(params_dict)
        candidates = entries_by_expert(expert_params_mapping)
        # fork: instead-of for[2]
        for _ in candidates(name):
            ...
        # fork: instead-of remapped_name
        remapped_name = None
        if not is_pp_missing_parameter(name, self):
            remapped_name = cache_scale_name(name, params_dict)
