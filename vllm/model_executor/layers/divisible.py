# SPDX-License-Identifier: Apache-2.0
"""Whether a layer can be split evenly over tensor-parallel ranks."""

from collections.abc import Sequence
from math import gcd

__all__ = ["check_divisible"]

_SIZES_NAMED = 32  # no tensor-parallel group of one model is larger


def check_divisible(layer: str, what: str, sizes: Sequence[int], tp_size: int) -> None:
    """Refuse sizes that ranks cannot share evenly.

    Args:
        layer: For the message.
        what: What is split: rows, columns, heads.
        sizes: How many of them each tensor of the layer has.
        tp_size: Ranks.

    Raises:
        ValueError: With the tensor-parallel sizes that work.
    """
    if any(size % tp_size for size in sizes):
        common = gcd(*sizes)
        work = ", ".join(str(n) for n in range(1, min(common, _SIZES_NAMED) + 1) if common % n == 0)
        raise ValueError(
            f"{layer}: {', '.join(map(str, sizes))} {what} cannot be split over {tp_size} tensor-parallel "
            f"ranks. Use --tensor-parallel-size {work}."
        )
