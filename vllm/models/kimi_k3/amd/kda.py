# SPDX-License-Identifier: Apache-2.0

from vllm.model_executor.layers.divisible import check_divisible


# fork: extend
class KimiK3DeltaAttention:
    # fork: edit e02a83144f96
    def __init__(self, prefix: str):
        # fork: after self.num_heads
        check_divisible(prefix, "heads", [self.num_heads], self.tp_size)
        # fork: at end
        self.A_log.tensor_name = f"{prefix}.A_log"
