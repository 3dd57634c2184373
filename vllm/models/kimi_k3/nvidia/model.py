from vllm.checkpoint.fused_modules import fused_modules_of, stacked_params, use_fused_modules
from vllm.model_executor.layers.fused_moe.expert_mapping import entries_by_expert
from vllm.models.kimi_k3.common.cache_scales import cache_scale_name
from vllm.models.kimi_k3.common.expert_names import use_file_names
from vllm.models.kimi_k3.common.expert_padding import zero_padded_experts
from vllm.models.kimi_k3.common.expert_width import rank_expert_width
from vllm.models.kimi_k3.common.parameters import Parameters
from vllm.models.kimi_k3.nvidia.model import is_pp_missing_parameter


# fork: extend
class KimiMoE:
    # fork: edit d7e1685145b1
    def __init__(self, moe_intermediate_size, min_moe_intermediate_per_partition):
        # fork: instead-of if[5]
        width = rank_expert_width(
            moe_intermediate_size, min_moe_intermediate_per_partition
        )
        self.padded_moe_intermediate_size = width.total
        # fork: instead-of if[-5]
        if width.padded:
            zero_padded_experts(self.experts, width.logical)
        # fork: at end
        use_file_names(self.experts)


# fork: extend
class KimiLinearModel:
    # fork: edit 08e01fb7129e
    def __init__(self, vllm_config, config):
        # fork: after self.config
        use_fused_modules(self, config, vllm_config.quant_config)

    # fork: edit dd60859d069e
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
