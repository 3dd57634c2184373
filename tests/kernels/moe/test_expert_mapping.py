# SPDX-License-Identifier: Apache-2.0
"""The entries of an expert mapping that a tensor's name is compared with."""

import pytest

from vllm.model_executor.layers.fused_moe.expert_mapping import entries_by_expert
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

NAMES = [
    "model.layers.12.block_sparse_moe.experts.1.w1.weight",
    "model.layers.1.block_sparse_moe.experts.12.w3.weight_scale",
    "layers.2.experts.2.w2.input_scale",
    "experts.30.w13.weight",
    "experts.w13_weight",
    "experts.w2_weight_scale",
    "experts.112.w1.weight",
    "experts.12",
    "model.layers.3.self_attn.q_proj.weight",
]


@pytest.mark.parametrize("redundant", [0, 5])
@pytest.mark.parametrize("fused", [False, True])
def test_no_entry_is_missed_and_their_order_is_kept(fused, redundant):
    mapping = RoutedExperts.build_expert_params_mapping(
        "w1", "w2", "w3", num_experts=40, num_redundant_experts=redundant, routed_experts_prefix="", include_fused=fused
    )
    candidates = entries_by_expert(mapping)
    matched = 0
    for name in NAMES:
        want = [entry for entry in mapping if entry[1] in name]
        assert [entry for entry in candidates(name) if entry[1] in name] == want, name
        assert len(candidates(name)) < 30 < len(mapping)
        matched += len(want)
    assert matched >= 3
