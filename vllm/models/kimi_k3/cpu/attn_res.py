# SPDX-License-Identifier: Apache-2.0
"""Attention residuals (AttnRes) in plain PyTorch."""

import torch


def attn_res(
    prefix: torch.Tensor,
    delta: torch.Tensor | None,
    blocks: torch.Tensor,
    norm_weight: torch.Tensor,
    qk_weight: torch.Tensor,
    output_norm_weight: torch.Tensor | None,
    num_blocks: int,
    block_write_idx: int,
    eps: float,
    output_norm_eps: float,
) -> torch.Tensor:
    """Mix the finished blocks and the running prefix, then normalise.

    Same contract as the Triton kernel of that name, so that a model calls
    either. With sources ``x_i`` (blocks, then prefix) and
    ``s_i = (norm_weight * qk_weight) . x_i / rms(x_i)``, the result is
    ``sum_i softmax(s)_i x_i``, RMS-normalised where ``output_norm_weight`` is
    given. Arithmetic is float32 whatever the storage.

    Args:
        prefix: ``[tokens, hidden]`` running sum; updated in place by ``delta``.
        delta: ``[tokens, hidden]`` to add to ``prefix`` first, or None.
        blocks: ``[tokens, >= num_blocks, hidden]`` finished block states;
            row ``block_write_idx`` receives the prefix when that is >= 0.
        norm_weight: ``[hidden]`` weight of the norm inside the score.
        qk_weight: ``[hidden]`` scoring vector.
        output_norm_weight: ``[hidden]``, or None for no norm of the result.
        num_blocks: how many rows of ``blocks`` are sources.
        block_write_idx: row to write, or -1.
        eps: epsilon inside the score's norm.
        output_norm_eps: epsilon of the result's norm.

    Returns:
        ``[tokens, hidden]`` in the dtype of ``prefix``.
    """
    if delta is not None:
        prefix.add_(delta)
    if block_write_idx >= 0:
        blocks[:, block_write_idx] = prefix
    if num_blocks == 0:
        mixed = prefix.float()
    else:
        sources = torch.cat([blocks[:, :num_blocks], prefix.unsqueeze(1)], dim=1)
        sources = sources.float()
        scores = sources @ (norm_weight.float() * qk_weight.float())
        scores = scores * torch.rsqrt(sources.square().mean(-1) + eps)
        mixed = torch.einsum("tn,tnd->td", scores.softmax(-1), sources)
    if output_norm_weight is not None:
        rms = torch.rsqrt(mixed.square().mean(-1, keepdim=True) + output_norm_eps)
        mixed = mixed * rms * output_norm_weight.float()
    return mixed.to(prefix.dtype)
