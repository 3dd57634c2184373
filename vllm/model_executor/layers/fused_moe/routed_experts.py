# SPDX-License-Identifier: Apache-2.0

from vllm.model_executor.layers.fused_moe.expert_mapping import entries_by_expert


# fork: extend
class RoutedExperts:
    # fork: edit e3039228fc2d
    def load_weights(self, expert_mapping, qual_name: str):
        # fork: after expert_mapping
        candidates = entries_by_expert(expert_mapping)
        # fork: instead-of for[1]
        for _ in candidates(qual_name):
            ...
