# SPDX-License-Identifier: Apache-2.0
"""Experts that are wider on a rank than the file's share of them."""

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

__all__ = ["clear_padding"]


def clear_padding(layer: "RoutedExperts") -> None:
    """Make what no tensor of the file fills add exactly nothing.

    Codes and block scales beyond the unpadded width, and beyond the unpadded hidden
    size, become zero: a zero code under an uninitialised scale may be NaN. Called
    after loading, since a reload brings new memory, and before a kernel reorders it.

    Args:
        layer: Experts with ``w13_weight`` ``[experts, shards * width, hidden / n]`` and
            ``w2_weight`` ``[experts, hidden, width / n]`` (perhaps ``_packed``), n
            elements to an item, and ``…_weight_scale`` of the same kind if quantised.
    """
    width = layer.moe_config.intermediate_size_per_partition_unpadded
    hidden = layer.moe_config.hidden_dim_unpadded
    assert width is not None and hidden is not None
    shards = 2 if layer.moe_config.is_act_and_mul else 1
    for name in ("weight", "weight_packed", "weight_scale"):
        w13, w2 = (getattr(layer, f"{bank}_{name}", None) for bank in ("w13", "w2"))
        if w13 is None or w2 is None:
            continue
        padded_width, padded_hidden = w13.shape[1] // shards, w2.shape[1]
        _clear(w13.data.unflatten(1, (shards, padded_width)), 2, width)
        _clear(w13.data, 2, hidden * w13.shape[2] // padded_hidden)
        _clear(w2.data, 1, hidden)
        _clear(w2.data, 2, width * w2.shape[2] // padded_width)


def _clear(tensor: torch.Tensor, dim: int, first: int) -> None:
    """Zero the indices of a dimension from ``first`` on."""
    if first < tensor.shape[dim]:
        rest = tensor.narrow(dim, first, tensor.shape[dim] - first)
        (rest.view(torch.uint8) if rest.element_size() == 1 else rest).zero_()
