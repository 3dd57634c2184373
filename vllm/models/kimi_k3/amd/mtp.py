from vllm.checkpoint.fused_modules import use_fused_modules


# fork: extend
class KimiK3MTP:
    # fork: edit a0e74fd20d92
    def __init__(self):
        # fork: after self.quant_config
        use_fused_modules(self, self.config, self.quant_config)
