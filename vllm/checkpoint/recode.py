# SPDX-License-Identifier: Apache-2.0
"""Turning the stored form of one weight into another, and counting what that loses."""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.checkpoint.compressed import block_fp8
from vllm.checkpoint.errors import CheckpointError
from vllm.checkpoint.formats import BLOCK, is_block_fp8
from vllm.checkpoint.headers import Entry
from vllm.model_executor.layers.quantization.utils.block_fp8_dequant import dequantize_block_fp8
from vllm.model_executor.layers.quantization.utils.mxfp4_dequant import E8M0_NAN, dequantize_mxfp4
from vllm.model_executor.layers.quantization.utils.nvfp4_dequant import dequantize_nvfp4, unpack_e2m1

if TYPE_CHECKING:
    from vllm.checkpoint.convert import Item

__all__ = ["Loss", "Recoder", "coarser"]

SLAB = 4 << 20  # elements converted together: 16 MiB in float32
SHOWN = 100  # tensors that are named in a loss report
DTYPES = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
}
# e4m3 powers of two: 2^-9 is the smallest subnormal, 2^8 the largest.
LEAST, MOST = -9, 8
NORMAL = -126  # smallest exponent of a normal float32


@dataclass
class Loss:
    """What a conversion lost.

    Attributes:
        gaps: MXFP4 blocks by how many powers of two their scale lies below the largest of
            the tensor, of w1 and w3 together. NVFP4 holds a gap of 17; beyond, a block is
            exact if its values are.
        lost: Tensor -> values changed by that, the first `SHOWN`.
        lost_tensors: How many tensors.
        rounded: Values that BF16 or FP8 could not express.
        inexact_scales: Tensor scales whose reciprocal is rounded: values then differ by
            one rounding in float32.
    """

    gaps: Counter[int] = field(default_factory=Counter)
    lost: dict[str, int] = field(default_factory=dict)
    lost_tensors: int = 0
    rounded: int = 0
    inexact_scales: int = 0

    def add(self, other: "Loss") -> None:
        """Add the counts of `other`."""
        self.gaps += other.gaps
        for name, count in sorted(other.lost.items())[: max(0, SHOWN - len(self.lost))]:
            self.lost[name] = count
        self.lost_tensors += other.lost_tensors
        self.rounded += other.rounded
        self.inexact_scales += other.inexact_scales

    def as_json(self) -> dict[str, Any]:
        """The attributes, gaps in order and as text."""
        return {**self.__dict__, "gaps": {str(gap): self.gaps[gap] for gap in sorted(self.gaps)}}

    @staticmethod
    def from_json(content: dict[str, Any]) -> "Loss":
        """The reverse of `as_json`."""
        return Loss(**{**content, "gaps": Counter({int(gap): count for gap, count in content["gaps"].items()})})


def _coarser_codes() -> torch.Tensor:
    """uint8 ``[6, 16]``: code of an e2m1 value divided by 2^k, rounded to nearest, ties to even."""
    values = unpack_e2m1(torch.arange(8, dtype=torch.uint8)[:, None])[:, 0]
    table = torch.zeros(6, 16, dtype=torch.uint8)
    for k in range(6):
        for code, value in enumerate(values):
            # Distance first, then an even code.
            nearest = min(range(8), key=lambda c: ((values[c] - value / 2**k).abs().item(), c % 2))
            table[k, code], table[k, code + 8] = nearest, nearest + 8
    return table


_COARSER = _coarser_codes()


def coarser(packed: torch.Tensor, steps: torch.Tensor, block: int) -> tuple[torch.Tensor, int]:
    """Codes for block scales that are 2^steps larger.

    Args:
        packed: uint8 ``[rows, columns / 2]``.
        steps: int64 ``[rows, columns / block]``, >= 0.
        block: Columns per scale.

    Returns:
        Codes, packed, and how many values they change.
    """
    index = steps.clamp(max=5).repeat_interleave(block // 2, 1) * 16
    low, high = index + (packed & 15), index + (packed >> 4)
    flat = _COARSER.flatten()
    new_low, new_high = flat[low], flat[high]
    new = new_low | (new_high << 4)
    factor = torch.exp2(steps.double()).repeat_interleave(block, 1)
    changed = unpack_e2m1(new).double() * factor != unpack_e2m1(packed).double()
    return new, int(changed.sum())


def _nan(item: "Item", count: int) -> CheckpointError:
    file = item.source["weight_scale"].file
    return CheckpointError(
        f"{item.module}.weight_scale in {file}: {count} block scales are NaN. Fetch the file again."
    )


class Recoder:
    """Converts modules into one file.

    Args:
        read: (entry, first byte, bytes) -> bytes of the source.
        copy: (entry, descriptor, first byte) writes a tensor of the source as it is.
        target: Descriptor of the file.
        starts: Where each tensor starts there.
    """

    def __init__(
        self,
        read: Callable[..., bytearray],
        copy: Callable[[Entry, int, int], None],
        target: int,
        starts: dict[str, int],
    ) -> None:
        self.read, self.copy, self.target, self.starts = read, copy, target, starts

    def recode(self, item: "Item") -> Loss:
        """Write all tensors of a module.

        Raises:
            CheckpointError: A NaN scale in an MXFP4 block, or a tensor scale that is none.
        """
        before, after = item.algos
        loss = Loss()
        if after is None:
            for rows, values in self._values(item):
                rounded = values.bfloat16()
                loss.rounded += int((rounded.float() != values).sum())
                self._put(item, "weight", rounded, rows.start)
        elif is_block_fp8(after) and is_block_fp8(before):
            self._copy(item, "weight", "weight")
            self._put(item, "weight_scale", self._block_scale(item))
        elif is_block_fp8(after):
            for rows, values in self._values(item):
                stored = block_fp8(values)
                back = dequantize_block_fp8(stored["weight"], stored["weight_scale"].float())
                loss.rounded += int((back != values).sum())
                self._put(item, "weight", stored["weight"], rows.start)
                self._put(item, "weight_scale", stored["weight_scale"].float(), rows.start // BLOCK)
        else:
            packed = next(leaf for leaf in ("weight_packed", "weight") if leaf in item.result)
            if before is not None and before.endswith("MXFP4"):
                scale = self._from_mxfp4(item, packed, loss)
            else:
                self._copy(item, "weight_packed" if "weight_packed" in item.source else "weight", packed)
                self._copy(item, "weight_scale", "weight_scale")
                scale = self._scalar(item, "weight_scale_2", "weight_global_scale", None)
            self._put_scalar(item, scale, loss, "weight_scale_2", "weight_global_scale")
            # Files that hold none run weight-only; published ones hold 1.
            activation = self._scalar(item, "input_scale", "input_global_scale", 1.0)
            self._put_scalar(item, activation, loss, "input_scale", "input_global_scale")
        return loss

    # --- reading ----------------------------------------------------------------------

    def _slabs(self, item: "Item") -> Iterator[range]:
        rows, columns = item.shape
        step = max(BLOCK, SLAB // columns // BLOCK * BLOCK)
        for first in range(0, rows, step):
            yield range(first, min(first + step, rows))

    def _rows(self, entry: Entry, rows: range) -> torch.Tensor:
        """Some rows of a stored tensor."""
        width = entry.nbytes // entry.shape[0]
        data = self.read(entry, rows.start * width, len(rows) * width)
        return torch.frombuffer(data, dtype=torch.uint8).view(DTYPES[entry.dtype]).view(len(rows), *entry.shape[1:])

    def _block_scale(self, item: "Item") -> torch.Tensor:
        """A block FP8 weight's scales, float32 ``[row blocks, column blocks]``."""
        entry = item.source.get("weight_scale") or item.source["weight_scale_inv"]
        scale = self._rows(entry, range(entry.shape[0])).float()
        return scale.reshape(scale.shape[0], -1)

    def _scalar(self, item: "Item", multiplier: str, divisor: str, default: float | None) -> tuple[float, bool]:
        """A tensor scale, and whether it divides."""
        entry = item.source.get(multiplier) or item.source.get(divisor)
        if entry is None:
            assert default is not None
            return default, False
        value = torch.frombuffer(self.read(entry), dtype=torch.float32).item()
        if not (math.isfinite(value) and value > 0):
            name = f"{item.module}.{multiplier if multiplier in item.source else divisor}"
            raise CheckpointError(f"{name} in {entry.file}: is {value}, expected > 0. Re-export the checkpoint.")
        return value, multiplier not in item.source

    def _values(self, item: "Item") -> Iterator[tuple[range, torch.Tensor]]:
        """The weight in slabs, dequantised to float32."""
        before = item.algos[0]
        fp8_scale = self._block_scale(item) if is_block_fp8(before) else None
        for rows in self._slabs(item):
            if before is None:
                yield rows, self._rows(item.source["weight"], rows).float()
            elif fp8_scale is not None:
                blocks = fp8_scale[rows.start // BLOCK : math.ceil(rows.stop / BLOCK)]
                yield rows, dequantize_block_fp8(self._rows(item.source["weight"], rows), blocks)
            else:
                packed = item.source.get("weight_packed") or item.source["weight"]
                codes, scale = self._rows(packed, rows), self._rows(item.source["weight_scale"], rows)
                if before.endswith("MXFP4"):
                    bad = int((scale.view(torch.uint8) == E8M0_NAN).sum())
                    if bad:
                        raise _nan(item, bad)
                    yield rows, dequantize_mxfp4(codes, scale)
                else:
                    tensor_scale, divides = self._scalar(item, "weight_scale_2", "weight_global_scale", None)
                    values = dequantize_nvfp4(codes, scale, 1.0 if divides else tensor_scale)
                    yield rows, values / tensor_scale if divides else values

    # --- MXFP4 to NVFP4 ---------------------------------------------------------------

    def _from_mxfp4(self, item: "Item", packed: str, loss: Loss) -> tuple[float, bool]:
        """Write codes and block scales; returns the tensor scale, a power of two.

        A block of 32 becomes two of 16 with its scale. The tensor scale puts the largest
        block scale at 2^8, so that scales 17 powers of two below it still fit.
        """
        own = item.source["weight_scale"]
        counts = [self._scale_codes(item, *partner, nonzero=False) for partner in item.partners]
        used = np.flatnonzero(np.sum(counts, 0)[:E8M0_NAN])
        smallest, largest = int(used.min(initial=255)), int(used.max(initial=0))
        exact = largest - smallest <= MOST - LEAST
        if not exact:  # only blocks of zeros may lie above the largest then
            nonzero = [self._scale_codes(item, *partner, nonzero=True) for partner in item.partners]
            largest = int(np.flatnonzero(np.sum(nonzero, 0)[:E8M0_NAN]).max(initial=smallest))
        mine = next(count for count, (_, scale) in zip(counts, item.partners, strict=True) if scale is own)
        if mine[E8M0_NAN]:
            raise _nan(item, int(mine[E8M0_NAN]))
        loss.gaps.update({largest - int(code): int(mine[code]) for code in np.flatnonzero(mine)})
        tensor = max(largest - 127 - MOST, NORMAL)
        wanted = np.clip(np.arange(256) - 127 - tensor, None, MOST)
        table = torch.exp2(torch.from_numpy(np.clip(wanted, LEAST, None)).float()).to(torch.float8_e4m3fn)
        steps = torch.from_numpy(np.clip(LEAST - wanted, 0, None))
        lost = 0
        for rows in self._slabs(item):
            codes = self._rows(own, rows).view(torch.uint8)
            scale = np.take(table.view(torch.uint8).numpy(), codes.numpy()).repeat(2, axis=1)
            self._put(item, "weight_scale", torch.from_numpy(scale).view(torch.float8_e4m3fn), rows.start)
            if not exact:
                elements, changed = coarser(self._rows(item.source["weight_packed"], rows), steps[codes.long()], 32)
                self._put(item, packed, elements, rows.start)
                lost += changed
        if exact:
            self._copy(item, "weight_packed", packed)
        if lost:
            loss.lost[f"{item.module}.weight"] = lost
            loss.lost_tensors += 1
        return 2.0**tensor, False

    def _scale_codes(self, item: "Item", packed: Entry, scale: Entry, nonzero: bool) -> np.ndarray:
        """How often each of the 256 codes stands in a block scale; `nonzero` leaves out blocks of zeros."""
        counts = np.zeros(256, np.int64)
        for rows in self._slabs(item):
            codes = self._rows(scale, rows).view(torch.uint8)
            if nonzero:
                codes = codes[(self._rows(packed, rows) & 0x77 != 0).unflatten(1, (-1, 16)).any(-1)]
            counts += np.bincount(codes.flatten().numpy(), minlength=256)
        return counts

    # --- writing ----------------------------------------------------------------------

    def _put(self, item: "Item", leaf: str, tensor: torch.Tensor, row: int = 0) -> None:
        """Write `tensor` as rows of a result from `row` on."""
        dtype, shape = item.result[leaf]
        assert tensor.dtype == DTYPES[dtype], (item.module, leaf, tensor.dtype)
        data = tensor.contiguous().flatten().view(torch.uint8).numpy()
        width = math.prod(shape[1:]) * tensor.itemsize
        self._write(memoryview(data), self.starts[f"{item.module}.{leaf}"] + row * width)

    def _write(self, data: memoryview, at: int) -> None:
        while data:
            done = os.pwrite(self.target, data, at)
            data, at = data[done:], at + done

    def _copy(self, item: "Item", source: str, leaf: str) -> None:
        self.copy(item.source[source], self.target, self.starts[f"{item.module}.{leaf}"])

    def _put_scalar(self, item: "Item", scale: tuple[float, bool], loss: Loss, multiplier: str, divisor: str) -> None:
        value, divides = scale
        leaf = multiplier if multiplier in item.result else divisor
        stored = torch.tensor(value, dtype=torch.float32)
        if divides != (leaf == divisor):
            loss.inexact_scales += math.frexp(value)[0] != 0.5
            stored = stored.reciprocal()
        if not bool(stored.isfinite() & (stored > 0)):
            raise CheckpointError(f"{item.module}: the tensor scale {value} has no reciprocal in float32.")
        self._put(item, leaf, stored.reshape(item.result[leaf][1]))
