# SPDX-License-Identifier: Apache-2.0
"""Dequantisation of block-scaled FP8 weights in plain torch."""

import torch

__all__ = ["dequantize_block_fp8"]


def dequantize_block_fp8(
    weight: torch.Tensor,
    scale: torch.Tensor,
    block: int = 128,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return ``weight * scale`` with one scale per ``block × block`` tile.

    Args:
        weight: e4m3 ``[rows, cols]``.
        scale: float32 ``[ceil(rows / block), ceil(cols / block)]``.
        block: Tile edge.
        out_dtype: Result dtype, rounded once from the float32 product.

    Returns:
        ``[rows, cols]`` in ``out_dtype``.

    Raises:
        ValueError: The scale's shape does not belong to the weight's.
    """
    rows, cols = weight.shape
    expected = (-(-rows // block), -(-cols // block))
    if tuple(scale.shape) != expected:
        raise ValueError(
            f"block scale of a {rows}x{cols} weight: expected shape {expected}, found "
            f"{tuple(scale.shape)}"
        )
    out = torch.empty((rows, cols), dtype=out_dtype, device=weight.device)
    columns = scale.repeat_interleave(block, dim=1)[:, :cols]
    # Row block by row block, so that the float32 copy stays small.
    for i, factors in enumerate(columns):
        tile = slice(i * block, (i + 1) * block)
        out[tile] = weight[tile].float() * factors
    return out
