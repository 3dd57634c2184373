# SPDX-License-Identifier: Apache-2.0
"""Routed experts as the files of Kimi K3 name them."""

from torch import nn


def use_file_names(experts: nn.Module) -> None:
    """Tell experts that gate, down and up are w1, w2 and w3 in the file, for messages that name a tensor.

    Args:
        experts: the MoE runner, or experts that hold their weights themselves.
    """
    routed = getattr(experts, "routed_experts", experts)
    routed.ckpt_gate_proj_name = "w1"
    routed.ckpt_down_proj_name = "w2"
    routed.ckpt_up_proj_name = "w3"
