# fork: edit 3a25dd7ed4d5
def _get_kv_b_proj_input_dtype(kv_b_proj):
    # fork: at start
    if not getattr(kv_b_proj.quant_method, "accepts_fp8_input", True):
        # Its kernel quantises by itself, if at all; the weight's dtype says nothing.
        return None
