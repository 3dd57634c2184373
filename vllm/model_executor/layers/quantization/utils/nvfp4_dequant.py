# SPDX-License-Identifier: Apache-2.0
"""Dequantisation of packed NVFP4 weights in plain torch.

An NVFP4 weight ``[rows, cols]`` is stored as

- ``packed``: uint8 ``[rows, cols / 2]``, two e2m1 codes per byte, the low
  nibble holding the even column;
- ``block_scale``: e4m3 ``[rows, cols / 16]``;
- ``tensor_scale``: float32 multiplier (ModelOpt's ``weight_scale_2``).
"""

import torch

__all__ = ["NVFP4_BLOCK", "dequantize_nvfp4", "scale_blocks", "unpack_e2m1"]

NVFP4_BLOCK = 16

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _byte_table() -> torch.Tensor:
    """Return int64 ``[256]``: for each byte its two float32 values, side by side."""
    codes = torch.tensor(_E2M1 + tuple(-v for v in _E2M1), dtype=torch.float32)
    byte = torch.arange(256)
    pairs = torch.stack((codes[byte & 0xF], codes[byte >> 4]), dim=1)
    return pairs.view(torch.int64).flatten()


# One gather of 8 bytes per packed byte: about twice as fast as two nibble lookups.
_PAIRS = _byte_table()


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """Return the float32 values ``[rows, cols]`` of uint8 ``[rows, cols / 2]``."""
    values = _PAIRS.index_select(0, packed.flatten().int()).view(torch.float32)
    return values.view(packed.shape[0], -1)


def dequantize_nvfp4(
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    tensor_scale: torch.Tensor | float,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return ``e2m1 * (block_scale * tensor_scale)``, computed in float32.

    The product is exact when ``tensor_scale`` is a power of two, so the result
    is then bit-equal to any other exact dequantisation of the same bytes.

    Args:
        packed: uint8 ``[rows, cols / 2]``.
        block_scale: e4m3 ``[rows, cols / 16]``; uint8 is read as e4m3 bits.
        tensor_scale: Scalar, or float32 broadcastable to ``[rows, 1]``.
        out_dtype: Result dtype, rounded once from float32.

    Returns:
        ``[rows, cols]`` in ``out_dtype``.

    Raises:
        ValueError: The shapes or dtypes do not form an NVFP4 weight.
    """
    return scale_blocks(packed, block_scale, torch.float8_e4m3fn, NVFP4_BLOCK, "NVFP4", tensor_scale).to(out_dtype)


def scale_blocks(
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    scale_dtype: torch.dtype,
    block: int,
    name: str,
    tensor_scale: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    """Return ``e2m1 * (block_scale * tensor_scale)`` in float32.

    Args:
        packed: uint8 ``[rows, cols / 2]``.
        block_scale: ``[rows, cols / block]``; uint8 is read as bits of ``scale_dtype``.
        scale_dtype: e4m3 or e8m0.
        block: Columns of a block.
        name: The format, for messages.
        tensor_scale: Scalar, or float32 broadcastable to ``[rows, 1]``.

    Returns:
        ``[rows, cols]``.

    Raises:
        ValueError: The shapes or dtypes do not form such a weight.
    """
    rows, half = packed.shape
    blocks = half * 2 // block
    if packed.dtype != torch.uint8 or half * 2 % block:
        raise ValueError(
            f"{name} weight: expected packed uint8 with a multiple of {block} columns, "
            f"found {packed.dtype} {tuple(packed.shape)}."
        )
    if block_scale.dtype == torch.uint8:
        block_scale = block_scale.view(scale_dtype)
    if block_scale.dtype != scale_dtype or block_scale.shape != (rows, blocks):
        raise ValueError(
            f"{name} block scale: expected {scale_dtype} {(rows, blocks)}, found "
            f"{block_scale.dtype} {tuple(block_scale.shape)}."
        )
    scale = block_scale.float() * tensor_scale
    values = unpack_e2m1(packed).view(rows, blocks, block)
    return values.mul_(scale.unsqueeze(-1)).view(rows, 2 * half)
