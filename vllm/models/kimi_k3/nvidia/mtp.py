from vllm.checkpoint.fused_modules import use_fused_modules


# fork: extend
class KimiK3MTP:
    # fork: edit 94f3a80902d8
    def __init__(self):
        # fork: after self.quant_config
        use_fused_modules(self, self.config, self.quant_config)
