# fork: edit 3a25dd7ed4d5
def _get_kv_b_proj_input_dtype(kv_b_proj):
    # fork: at start
    if not getattr(kv_b_proj.quant_method, "accepts_fp8_input", True):
        # Its kernel quantises by itself, if at all; the weight's dtype says nothing.
        # Under FP8 prefill the latent comes as FP8, straight from the cache.
        return kv_b_proj.params_dtype
