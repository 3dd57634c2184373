# fork: extend
class MultiHeadLatentAttention:
    # fork: edit 792cdaf79496
    def __init__(self):
        # fork: after self.fused_qkv_a_proj
        self.fused_qkv_a_proj.output_is_split = True
