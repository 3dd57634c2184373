# SPDX-License-Identifier: Apache-2.0
"""Top-k routing in plain torch, for CPU, where the fused ops do not exist."""

import torch

__all__ = ["topk_with_bias"]


def topk_with_bias(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    topk: int,
    scoring_func: str,
    renormalize: bool,
    scaling_factor: float = 1.0,
    indices_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by biased score and weight them by the score without bias.

    Args:
        logits: ``[tokens, experts]``, any float dtype.
        bias: float32 ``[experts]`` added for the choice only, or None.
        topk: Experts per token.
        scoring_func: ``"sigmoid"`` or ``"softmax"``.
        renormalize: Divide a token's weights by their sum.
        scaling_factor: Factor on the weights, applied last.
        indices_dtype: Dtype of the ids, int32 by default.

    Returns:
        Weights float32 ``[tokens, topk]`` and ids ``[tokens, topk]``.

    Raises:
        ValueError: Unknown ``scoring_func``.
    """
    if scoring_func == "sigmoid":
        scores = logits.float().sigmoid()
    elif scoring_func == "softmax":
        scores = logits.float().softmax(dim=-1)
    else:
        raise ValueError(
            f"CPU routing supports 'sigmoid' and 'softmax', found {scoring_func!r}."
        )
    choice = scores if bias is None else scores + bias.float()
    ids = choice.topk(topk, dim=-1).indices
    weights = scores.gather(1, ids)
    if renormalize:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    if scaling_factor != 1.0:
        weights = weights * scaling_factor
    return weights, ids.to(indices_dtype or torch.int32)
