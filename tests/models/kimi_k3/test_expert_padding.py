# SPDX-License-Identifier: Apache-2.0
"""The padded part of a rank's expert width, before loading."""

from types import SimpleNamespace

import pytest
import torch

from vllm.model_executor.layers.quantization.utils.unloaded import mark_unloaded
from vllm.models.kimi_k3.common.expert_padding import zero_padded_experts


def experts(names):
    """A runner whose routed experts hold NaN-filled parameters."""
    routed = torch.nn.Module()
    for name in names:
        routed.register_parameter(name, torch.nn.Parameter(torch.full((2, 4), torch.nan), requires_grad=False))
    return SimpleNamespace(routed_experts=routed, moe_config=SimpleNamespace())


@pytest.mark.parametrize("suffix", ["", "_packed"])
@pytest.mark.parametrize("marked", [False, True])
def test_nothing_uninitialised_is_left(suffix, marked):
    """Scales that are marked, to notice what is not loaded, are cleared after loading (PUBLIC_CASES 20)."""
    names = [f"w13_weight{suffix}", f"w2_weight{suffix}", "w13_weight_scale", "w2_weight_scale"]
    runner = experts([*names, "w13_weight_scale_2"])
    parameters = dict(runner.routed_experts.named_parameters())
    for name in names[2:] if marked else ():
        mark_unloaded(parameters[name])
    zero_padded_experts(runner, 160)
    for name in names:
        left = marked and name.endswith("scale")
        assert bool(parameters[name].isnan().all()) == left
        assert bool((parameters[name] == 0).all()) != left
    assert parameters["w13_weight_scale_2"].isnan().all()
    assert runner.moe_config.intermediate_size_per_partition_unpadded == 160


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="expected w13_weight and w2_weight.*found .'up'"):
        zero_padded_experts(experts(["up"]), 160)
