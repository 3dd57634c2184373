# SPDX-License-Identifier: Apache-2.0
"""Dequantisation of packed MXFP4 weights in plain torch.

An MXFP4 weight ``[rows, cols]`` is stored as

- ``packed``: uint8 ``[rows, cols / 2]``, two e2m1 codes per byte, the low
  nibble holding the even column;
- ``block_scale``: e8m0 ``[rows, cols / 32]``: code c is ``2 ** (c - 127)``, 255 NaN.
"""

import torch

from vllm.model_executor.layers.quantization.utils.nvfp4_dequant import scale_blocks

__all__ = ["E8M0_NAN", "MXFP4_BLOCK", "dequantize_mxfp4"]

MXFP4_BLOCK = 32
E8M0_NAN = 0xFF


def dequantize_mxfp4(
    packed: torch.Tensor,
    block_scale: torch.Tensor,
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """Return ``e2m1 * 2 ** (code - 127)``, which float32 and bfloat16 hold exactly.

    Args:
        packed: uint8 ``[rows, cols / 2]``.
        block_scale: uint8 (read as e8m0 bits) or e8m0 ``[rows, cols / 32]``.
        out_dtype: Result dtype.

    Returns:
        ``[rows, cols]`` in ``out_dtype``.

    Raises:
        ValueError: The shapes or dtypes do not form an MXFP4 weight.
    """
    return scale_blocks(packed, block_scale, torch.float8_e8m0fnu, MXFP4_BLOCK, "MXFP4").to(out_dtype)
