# SPDX-License-Identifier: Apache-2.0

from vllm.model_executor.layers.fused_moe.expert_padding import clear_padding


# fork: extend
class UnquantizedFusedMoEMethod:
    # fork: edit ac563120bf2e
    def process_weights_after_loading(self, layer):
        # fork: at start
        clear_padding(layer)
