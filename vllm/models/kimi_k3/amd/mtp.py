from vllm.checkpoint.fused_modules import fused_modules_of, stacked_params, use_fused_modules
from vllm.models.kimi_k3.common.draft_names import draft_parameter_name


# fork: extend
class KimiK3MTP:
    # fork: edit a0e74fd20d92
    def __init__(self):
        # fork: after self.quant_config
        use_fused_modules(self, self.config, self.quant_config)

    # fork: edit 40ff8bad2eaf
    def load_weights(self, stacked_params_mapping, name, params_dict):
        # fork: drop kda_config
        # fork: drop use_full_rank_gate
        # fork: drop beta_shard_id
        # fork: drop if[0]
        # fork: drop if[1]
        # fork: instead-of stacked_params_mapping[0]
        stacked_params_mapping = stacked_params(fused_modules_of(self.config))
        # fork: instead-of remapped_name
        remapped_name = draft_parameter_name(name, params_dict)
