# SPDX-License-Identifier: Apache-2.0
"""Inputs and results of a block-scaled FP8 linear, in plain arithmetic on its codes."""

import math

import torch


def e4m3(code: int) -> float:
    """The value of a code: 1 sign, 4 exponent, 3 mantissa bits."""
    exponent, mantissa = code >> 3 & 15, code & 7
    value = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -value if code & 128 else value


def inputs(tokens: int, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Codes of every kind, a different scale per block, and x as columns of a wider tensor."""
    gen = torch.Generator().manual_seed(rows + columns + tokens)
    codes = torch.randint(0, 127, (rows, columns), generator=gen)
    codes += 128 * torch.randint(0, 2, codes.shape, generator=gen)
    blocks = rows // 128, columns // 128
    scale = 2.0 ** -(torch.arange(math.prod(blocks)) * 5 % 11 + 6.0).view(blocks)
    wide = torch.randn(tokens, columns + 128, generator=gen).bfloat16()
    return {"x": wide[:, :columns], "codes": codes, "scale": scale}


def reference(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([e4m3(c) for c in range(256)], dtype=torch.float64, device=codes.device)
    weight = table[codes] * scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return x.double() @ weight.T
