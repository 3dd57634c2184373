# SPDX-License-Identifier: Apache-2.0
"""Parameters that start as NaN, so that what no tensor of the file fills is noticed."""

import torch

__all__ = ["is_marked", "mark_unloaded", "set_dummy_scales"]

# A NaN, and a modest number, in the bytes that hold them; uint8 holds e8m0.
_CODES = {torch.float8_e4m3fn: (0x7F, 0x38), torch.uint8: (0xFF, 117)}


def mark_unloaded(param: torch.Tensor) -> None:
    """Fill a parameter with its dtype's NaN, now and whenever a reload makes it anew."""
    _fill(param, number=0)
    param.starts_unloaded = True  # type: ignore[attr-defined]


def is_marked(param: torch.Tensor) -> bool:
    """Whether the parameter started as NaN."""
    return getattr(param, "starts_unloaded", False)


def set_dummy_scales(model: torch.nn.Module) -> None:
    """Give marked scales a value for ``--load-format dummy``.

    Random numbers, as other parameters get, would be negative for half of the scales,
    and integers get none at all.
    """
    for name, param in model.named_parameters():
        if is_marked(param) and "scale" in name.rpartition(".")[2]:
            _fill(param, number=1)


def _fill(param: torch.Tensor, number: int) -> None:
    codes = _CODES.get(param.dtype)
    if codes is None:
        param.data.fill_((float("nan"), 1e-3)[number])
    else:
        param.data.view(torch.uint8).fill_(codes[number])
