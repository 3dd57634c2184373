# SPDX-License-Identifier: Apache-2.0
"""One NVFP4 tensor scale for parts that were quantised with several.

Kernels take one tensor scale for gate and up, or for the shards of a fused
linear. A value is ``e2m1 * block scale * tensor scale``, so a part's block scales
can be expressed for another tensor scale by the ratio of the two: exactly where
that is a power of two and the result stays a normal e4m3 number, else with one
rounding to e4m3. The largest tensor scale is kept: ratios are then at most one
and nothing can overflow.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm.logger import init_logger

__all__ = ["Unified", "share_shard_tensor_scale", "share_tensor_scale", "share_w13_tensor_scale"]

logger = init_logger(__name__)


@dataclass(frozen=True)
class Unified:
    """What sharing a tensor scale did.

    Attributes:
        tensor_scale: float32 ``[...]``, the one kept.
        rounded: block scales that e4m3 could not express for it.
        worst: largest relative error among them.
    """

    tensor_scale: torch.Tensor
    rounded: int
    worst: float


def share_tensor_scale(
    block_scale: torch.Tensor, tensor_scales: torch.Tensor, rows: Sequence[int]
) -> Unified:
    """Re-express block scales, in place, for the largest tensor scale.

    Args:
        block_scale: float8_e4m3fn ``[..., sum(rows), columns / 16]``.
        tensor_scales: float32 ``[..., len(rows)]``, multipliers.
        rows: Rows of each part, in order.

    Raises:
        ValueError: A tensor scale is zero, negative or not finite.
    """
    if not bool((tensor_scales.isfinite() & (tensor_scales > 0)).all()):
        raise ValueError(f"tensor scales must be positive: {tensor_scales.tolist()}")
    kept = tensor_scales.amax(-1)
    ratios = (tensor_scales.double() / kept.double().unsqueeze(-1)).unbind(-1)
    rounded, worst = 0, 0.0
    for part, ratio in zip(block_scale.split(list(rows), dim=-2), ratios):
        if bool((ratio == 1).all()):
            continue
        want = part.double() * ratio[..., None, None]
        part.copy_(want.to(torch.float8_e4m3fn))
        error = (part.double() - want).abs() / want.abs().clamp(min=1e-300)
        rounded += int((error > 0).sum())
        worst = max(worst, error.max().item())
    return Unified(kept, rounded, worst)


def share_shard_tensor_scale(
    layer_name: str, block_scale: torch.Tensor, tensor_scales: torch.Tensor, rows: Sequence[int]
) -> None:
    """Re-express the shards of a fused linear layer for the largest of their tensor scales.

    Args:
        layer_name: For the message.
        block_scale: float8_e4m3fn ``[sum(rows), columns / 16]``, changed in place where
            shards differ.
        tensor_scales: ``[shards]``, multipliers.
        rows: Rows of each shard.

    Raises:
        ValueError: Scales differ, and one of them is not positive.
    """
    if bool((tensor_scales == tensor_scales[0]).all()):
        return
    if not bool((tensor_scales > 0).all()):
        raise ValueError(
            f"{layer_name}: its shards have the tensor scales {tensor_scales.tolist()}, "
            "expected positive ones. Re-export the checkpoint."
        )
    done = share_tensor_scale(block_scale, tensor_scales, rows)
    report = logger.warning if done.rounded else logger.info
    report(
        "%s: its shards have different tensor scales; their block scales were re-expressed for the largest one, %s.",
        layer_name,
        f"{done.rounded} of them rounded by up to {done.worst:.1%}" if done.rounded else "exactly",
    )


def share_w13_tensor_scale(
    layer_name: str, block_scale: torch.Tensor, tensor_scales: torch.Tensor
) -> torch.Tensor:
    """Give the gate and up halves of every expert one tensor scale.

    Args:
        layer_name: For the message.
        block_scale: float8_e4m3fn ``[experts, 2 * width, hidden / 16]``, changed
            in place where an expert's halves differ.
        tensor_scales: float32 ``[experts, 2]``, multipliers.

    Returns:
        float32 ``[experts]``.

    Raises:
        ValueError: A tensor scale is zero, negative or not finite.
    """
    bad = ~(tensor_scales.isfinite() & (tensor_scales > 0))
    if bool(bad.any()):
        expert, half = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{layer_name}: the tensor scale of w{(1, 3)[half]} of local expert {expert} is "
            f"{tensor_scales[expert, half].item()}, expected > 0 "
            f"({int(bad.sum())} such scales). Re-export the checkpoint."
        )
    differ = (tensor_scales[:, 0] != tensor_scales[:, 1]).nonzero().flatten().tolist()
    shared = tensor_scales[:, 0].clone()
    half = block_scale.shape[1] // 2
    rounded, worst = 0, 0.0
    for expert in differ:  # one at a time: a bank's scales are gigabytes in float64
        done = share_tensor_scale(block_scale[expert], tensor_scales[expert], (half, half))
        shared[expert] = done.tensor_scale
        rounded, worst = rounded + done.rounded, max(worst, done.worst)
    if differ:
        report = logger.warning if rounded else logger.info
        report(
            "%s: w1 and w3 of %d of %d experts have different tensor scales; their block scales were re-expressed "
            "for the larger one, %s.",
            layer_name,
            len(differ),
            len(tensor_scales),
            f"{rounded} of them rounded by up to {worst:.1%}" if rounded else "exactly",
        )
    return shared
