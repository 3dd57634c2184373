# SPDX-License-Identifier: Apache-2.0
"""SiTU, the gated activation of Kimi K3, and the check of its two constants.

``situ(g, u) = beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta)``

SiTU is not homogeneous: scaling gate or up does not scale the result, so no
quantisation scale may be folded across it. It always sees dequantised values.
"""

import math
from typing import TYPE_CHECKING

import torch

from vllm.model_executor.layers.fused_moe.activation import MoEActivation

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig

__all__ = ["check_situ_config", "situ_and_mul"]


def situ_and_mul(
    gate_up: torch.Tensor, beta: float, linear_beta: float | None
) -> torch.Tensor:
    """Apply SiTU to a fused ``[gate | up]`` tensor.

    Args:
        gate_up: ``[..., 2 * width]``, any float dtype; gate is the first half.
        beta: Soft limit of the gate, > 0.
        linear_beta: Soft limit of the up half, > 0, or None to leave it as is.

    Returns:
        ``[..., width]`` in float32; the caller rounds.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    out = torch.tanh(gate / beta).mul_(beta).mul_(torch.sigmoid(gate))
    if linear_beta is None:
        return out.mul_(up)
    return out.mul_(torch.tanh(up / linear_beta).mul_(linear_beta))


def check_situ_config(config: "FusedMoEConfig", kind: str) -> None:
    """Refuse a SiTU layer whose constants are missing or not positive.

    Called where a MoE backend is chosen, since some kernels read a constant
    <= 0 as "off" and would answer with another activation.

    Args:
        config: Layer configuration.
        kind: Kind of MoE for the message, e.g. ``"NVFP4"``.

    Raises:
        ValueError: ``activation_situ_beta`` is missing, not finite or <= 0, or
            ``activation_situ_linear_beta`` is given and not finite or <= 0.
    """
    if config.activation != MoEActivation.SITU:
        return
    constants = {"activation_situ_beta": config.activation_situ_beta}
    if config.activation_situ_linear_beta is not None:
        constants["activation_situ_linear_beta"] = config.activation_situ_linear_beta
    for name, value in constants.items():
        if value is None or not math.isfinite(value) or value <= 0:
            requested = getattr(config, "moe_backend", "auto")
            raise ValueError(
                f"{kind} MoE (moe_backend={requested!r}): activation 'situ' needs "
                f"{name} > 0, found {value}. Set {name} in the model's config.json."
            )
