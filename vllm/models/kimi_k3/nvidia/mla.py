# SPDX-License-Identifier: Apache-2.0

from vllm.model_executor.layers.divisible import check_divisible


# fork: extend
class MultiHeadLatentAttention:
    # fork: edit 792cdaf79496
    def __init__(self, num_heads: int, prefix: str, tp_size: int):
        # fork: after tp_size
        check_divisible(prefix, "heads", [num_heads], tp_size)
        # fork: after self.fused_qkv_a_proj
        self.fused_qkv_a_proj.output_is_split = True
