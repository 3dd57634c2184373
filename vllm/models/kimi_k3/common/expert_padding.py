# SPDX-License-Identifier: Apache-2.0
"""Experts that are wider on a rank than the checkpoint's share of them."""

from torch import nn

from vllm.model_executor.layers.quantization.utils.unloaded import is_marked


def zero_padded_experts(experts: nn.Module, logical_width: int) -> None:
    """Make the part of the experts' width that no tensor fills add nothing.

    Called before loading. Methods that know of padding clear it once more after each
    load (``fused_moe/expert_padding.py``); their scales are marked, to notice what a
    checkpoint lacks, and left alone here. For other methods, zero codes are not enough
    where a block scale is uninitialised memory: zero times NaN is NaN.

    Args:
        experts: the MoE runner, or experts that hold their weights themselves.
        logical_width: intermediate size per rank without padding.

    Raises:
        ValueError: the experts have no weights under a known name.
    """
    routed = getattr(experts, "routed_experts", experts)
    found = 0
    for bank in ("w13_weight", "w2_weight"):
        for name in (bank, f"{bank}_packed"):
            if hasattr(routed, name):
                getattr(routed, name).data.zero_()
                found += 1
        scale = getattr(routed, f"{bank}_scale", None)
        if scale is not None and not is_marked(scale):
            scale.data.zero_()
    if found != 2:
        names = [name for name, _ in routed.named_parameters()]
        raise ValueError(
            f"{type(routed).__name__}: cannot clear its padded width; expected "
            f"w13_weight and w2_weight, packed or not, found {names}"
        )
    experts.moe_config.intermediate_size_per_partition_unpadded = logical_width
