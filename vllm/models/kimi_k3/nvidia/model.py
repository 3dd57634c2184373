from vllm.checkpoint.fused_modules import use_fused_modules


# fork: extend
class KimiLinearModel:
    # fork: edit 08e01fb7129e
    def __init__(self, vllm_config, config):
        # fork: after self.config
        use_fused_modules(self, config, vllm_config.quant_config)
