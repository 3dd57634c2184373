# SPDX-License-Identifier: Apache-2.0
"""The padded part of a rank's expert width, before loading."""

from types import SimpleNamespace

import pytest
import torch

from vllm.models.kimi_k3.common import expert_padding


def experts(names):
    """A runner whose routed experts hold NaN-filled parameters."""
    routed = torch.nn.Module()
    for name in names:
        routed.register_parameter(name, torch.nn.Parameter(torch.full((2, 4), torch.nan), requires_grad=False))
    return SimpleNamespace(routed_experts=routed, moe_config=SimpleNamespace())


@pytest.mark.parametrize("suffix", ["", "_packed"])
@pytest.mark.parametrize("on_cpu", [False, True])
def test_nothing_uninitialised_is_left(monkeypatch, suffix, on_cpu):
    """On CPU the scales keep their marks of what is not loaded (case 20)."""
    monkeypatch.setattr(expert_padding, "current_platform", SimpleNamespace(is_cpu=lambda: on_cpu))
    names = [f"w13_weight{suffix}", f"w2_weight{suffix}", "w13_weight_scale", "w2_weight_scale"]
    runner = experts([*names, "w13_weight_scale_2"])
    expert_padding.zero_padded_experts(runner, 160)
    parameters = dict(runner.routed_experts.named_parameters())
    for name in names:
        left = on_cpu and name.endswith("scale")
        assert bool(parameters[name].isnan().all()) == left
        assert bool((parameters[name] == 0).all()) != left
    assert parameters["w13_weight_scale_2"].isnan().all()
    assert runner.moe_config.intermediate_size_per_partition_unpadded == 160


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="expected w13_weight and w2_weight.*found .'up'"):
        expert_padding.zero_padded_experts(experts(["up"]), 160)
