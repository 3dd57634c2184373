# SPDX-License-Identifier: Apache-2.0
"""How a file stores one weight, by format: names, dtypes, shapes and bytes.

The only table of this. Inspecting compares headers with it, converting reads and
writes by it.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from vllm.checkpoint.headers import Entry

__all__ = ["BLOCK", "CT", "Dialect", "FLOATS", "INPUT_SCALES", "closest", "dialects", "is_block_fp8", "nbytes"]

FLOATS = ("BF16", "F16", "F32")
CT = "compressed-tensors "  # in front of the layouts of that library's configs
BLOCK = 128
# Algorithm -> the activation scale that a file may hold beside its weights.
INPUT_SCALES = {"NVFP4": "input_scale", CT + "NVFP4": "input_global_scale"}

_SCALAR = ((), (1,))


@dataclass(frozen=True)
class Dialect:
    """One way to store a weight of ``[out, in]``.

    Attributes:
        name: For reports.
        tensors: Last part of the tensor's name to its dtypes and shapes, the usual one
            first.
    """

    name: str
    tensors: dict[str, tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]]


def dialects(algo: str | None, shape: tuple[int, ...], leaf: str = "weight") -> list[Dialect]:
    """Ways to store a weight, the published one first; empty if `algo` is not described.

    Args:
        algo: ModelOpt's name, a compressed-tensors layout behind `CT`, or None.
        shape: Unquantised shape.
        leaf: Last part of the tensor's name, for unquantised ones.
    """
    if algo is None:
        return [Dialect("unquantised", {leaf: (FLOATS, (shape,))})]
    if len(shape) != 2:
        return []
    out, inp = shape
    blocks = (math.ceil(out / BLOCK), math.ceil(inp / BLOCK))
    fp8 = {"weight": (("F8_E4M3",), (shape,))}
    nvfp4_scale = {"weight_scale": (("F8_E4M3",), ((out, inp // 16),))}
    packed = (("U8",), ((out, inp // 2),))
    if algo == "NVFP4":
        return [
            Dialect("ModelOpt", {"weight": packed, **nvfp4_scale, "weight_scale_2": (("F32",), _SCALAR)}),
        ]
    if algo == "FP8_PB_WO":
        rank_4 = (blocks[0], 1, blocks[1], 1)
        return [
            Dialect("rank-4 weight_scale", {**fp8, "weight_scale": (("F32",), (rank_4,))}),
            Dialect("rank-2 weight_scale_inv", {**fp8, "weight_scale_inv": (("F32",), (blocks,))}),
            Dialect("rank-2 weight_scale", {**fp8, "weight_scale": (("F32",), (blocks,))}),
        ]
    if algo == CT + "FP8_BLOCK":
        return [Dialect("compressed-tensors", {**fp8, "weight_scale": (("F32", "BF16", "F16"), (blocks,))})]
    if algo == CT + "MXFP4":
        scale = (("U8", "F8_E8M0"), ((out, inp // 32),))
        return [Dialect("compressed-tensors", {"weight_packed": packed, "weight_scale": scale})]
    if algo == CT + "NVFP4":
        divisor = {"weight_global_scale": (("F32",), _SCALAR[::-1])}
        return [Dialect("compressed-tensors", {"weight_packed": packed, **nvfp4_scale, **divisor})]
    return []


def closest(module: str, choices: Sequence[Dialect], entries: Mapping[str, Entry]) -> Dialect:
    """The dialect most of whose tensors the module has, in the right shape; the first of equals."""
    if len(choices) == 1:
        return choices[0]

    def fits(choice: Dialect) -> tuple[int, int]:
        there = [(entries.get(f"{module}.{leaf}"), shapes) for leaf, (_, shapes) in choice.tensors.items()]
        return sum(e is not None for e, _ in there), sum(e is not None and e.shape in s for e, s in there)

    return max(choices, key=fits)


def is_block_fp8(algo: str | None) -> bool:
    """Whether the format has one scale per 128x128 block."""
    return algo in ("FP8_PB_WO", CT + "FP8_BLOCK")


def nbytes(algo: str | None, shape: Collection[int], dtype: str = "BF16") -> int:
    """Bytes that a weight takes in memory, scales included.

    Args:
        algo: As in `dialects`.
        shape: The part that is held, padding included.
        dtype: Of an unquantised tensor, ``"BF16"`` or ``"F32"``.
    """
    count = math.prod(shape)
    if algo is None or len(shape) != 2:
        return count * (4 if dtype == "F32" else 2)
    rows, columns = shape
    if is_block_fp8(algo):
        return count + 4 * math.ceil(rows / BLOCK) * math.ceil(columns / BLOCK)
    if algo.endswith("MXFP4"):
        return count // 2 + rows * math.ceil(columns / 32)
    if algo.endswith("NVFP4"):
        return count // 2 + rows * math.ceil(columns / 16) + 8
    return count  # formats that are not described have about a byte per element
