# SPDX-License-Identifier: Apache-2.0
"""Reading all scales of a checkpoint, to find those that no quantiser writes."""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field

import numpy as np
from tqdm import tqdm

from vllm.checkpoint.headers import Entry
from vllm.checkpoint.model import Model
from vllm.checkpoint.report import Report, Scales

__all__ = ["scan_scales"]

CHUNK = 4 << 20  # bytes a thread looks at together; its counts take eight times that
BLOCK_SCALES = ("weight_scale", "weight_scale_inv")
TENSOR_SCALES = ("weight_scale_2", "weight_global_scale", "input_scale", "input_global_scale")
_NAN = {"F8_E4M3": (0x7F, 0xFF), "F8_E8M0": (0xFF,), "U8": (0xFF,)}  # U8 is e8m0 in MXFP4 files
_FLOATS: dict[str, np.dtype] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}


@dataclass
class _Found:
    """What one tensor or one file holds."""

    scales: dict[str, Scales] = field(default_factory=dict)
    problems: list[tuple[str, bool]] = field(default_factory=list)
    tensor_scales: dict[str, float] = field(default_factory=dict)


def scan_scales(model: Model, entries: Mapping[str, Entry], report: Report, progress: bool = True) -> None:
    """Read every scale and add what is wrong to the report.

    A tensor scale must be finite and positive. A block scale may be zero, but not NaN,
    infinite or negative. ``A_log`` behind the last head must be zero.

    Memory: `CHUNK` bytes and their counts per thread, and one float per tensor scale.
    """
    files: dict[str, list[tuple[str, Entry]]] = {}
    for name, entry in entries.items():
        if name.rpartition(".")[2] in (*BLOCK_SCALES, *TENSOR_SCALES, "A_log"):
            files.setdefault(entry.file, []).append((name, entry))
    total = sum(entry.nbytes for items in files.values() for _, entry in items)
    tensor_scales: dict[str, float] = {}
    bar = tqdm(
        total=total, unit="B", unit_scale=True, unit_divisor=1024, desc="scales", disable=None if progress else True
    )
    with bar, ThreadPoolExecutor(os.cpu_count()) as pool:
        for done in as_completed(pool.submit(_scan, model, file, items, bar.update) for file, items in files.items()):
            found = done.result()
            tensor_scales |= found.tensor_scales
            for leaf, scales in found.scales.items():
                report.scales.setdefault(leaf, Scales()).add(scales)
            for text, error in found.problems:
                report.add("values", text, error)
    _compare_halves(report, tensor_scales)


def _scan(
    model: Model, file: str, items: list[tuple[str, Entry]], advance: Callable[[int], object]
) -> _Found:
    found = _Found()
    with open(model.folder / file, "rb", buffering=0) as stream:
        for name, entry in sorted(items, key=lambda item: item[1].start):
            leaf = name.rpartition(".")[2]
            if leaf == "A_log":
                _check_tail(found, name, entry, model, stream)
            else:
                scales = Scales(tensors=1)
                for chunk in _chunks(stream, entry):
                    _count(scales, chunk, entry.dtype)
                    if leaf in TENSOR_SCALES and entry.dtype == "F32" and chunk:
                        found.tensor_scales[name] = float(np.frombuffer(chunk, "<f4")[0])
                found.scales.setdefault(leaf, Scales()).add(scales)
                bad = {"NaN": scales.nan, "infinite": scales.infinite, "negative": scales.negative}
                if leaf in TENSOR_SCALES:
                    bad["zero"] = scales.zero
                for what, count in bad.items():
                    if count:
                        text = f"{name} in {entry.file}: {count} of {scales.values} scales are {what}; expected > 0"
                        found.problems.append((text, True))
            advance(entry.nbytes)
    return found


def _chunks(stream, entry: Entry) -> Iterator[bytes]:
    for start in range(entry.start, entry.start + entry.nbytes, CHUNK):
        yield os.pread(stream.fileno(), min(CHUNK, entry.start + entry.nbytes - start), start)


def _count(scales: Scales, chunk: bytes, dtype: str) -> None:
    if dtype in _NAN:
        # 256 codes: count them, then look at each once.
        counts = np.bincount(np.frombuffer(chunk, np.uint8), minlength=256)
        nan = np.zeros(256, bool)
        nan[list(_NAN[dtype])] = True
        values = _code_values(dtype)
        scales.values += len(chunk)
        scales.nan += int(counts[nan].sum())
        scales.zero += int(counts[~nan & (values == 0)].sum())
        scales.negative += int(counts[~nan & (values < 0)].sum())
        used = np.abs(values[(counts > 0) & ~nan & (values != 0)])
    elif dtype in _FLOATS:
        values = np.frombuffer(chunk, _FLOATS[dtype])
        if dtype == "BF16":
            values = (values.astype("<u4") << 16).view("<f4")
        scales.values += len(values)
        scales.nan += int(np.isnan(values).sum())
        scales.infinite += int(np.isinf(values).sum())
        scales.zero += int((values == 0).sum())
        scales.negative += int((values < 0).sum())
        used = np.abs(values[np.isfinite(values) & (values != 0)])
    else:
        return
    if len(used):
        scales.see(math.frexp(float(used.min()))[1] - 1, math.frexp(float(used.max()))[1] - 1)


def _code_values(dtype: str) -> np.ndarray:
    """Values of the 256 codes of e4m3 or e8m0; NaN codes get any value."""
    codes = np.arange(256)
    if dtype != "F8_E4M3":
        return np.exp2(codes - 127.0)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    magnitude = np.where(exponent == 0, mantissa / 8 * 2.0**-6, (1 + mantissa / 8) * np.exp2(exponent - 7.0))
    return np.where(codes < 128, magnitude, -magnitude)


def _check_tail(found: _Found, name: str, entry: Entry, model: Model, stream) -> None:
    spec = model.specs.get(name)
    if spec is None or len(entry.shape) != 1 or entry.dtype != "F32":
        return
    values = np.frombuffer(os.pread(stream.fileno(), entry.nbytes, entry.start), "<f4")
    if values[spec.shape[0] :].any():
        text = f"{name} in {entry.file}: {len(values)} values for {spec.shape[0]} heads, and the surplus is not zero"
        found.problems.append((text, True))


def _compare_halves(report: Report, tensor_scales: Mapping[str, float]) -> None:
    """Ratios of the tensor scales of w3 and w1, which the engine runs with one scale."""
    ratios: Counter[str] = Counter()
    rounded = 0
    for name, w1 in tensor_scales.items():
        head, part, leaf = name.rpartition(".w1.")
        w3 = tensor_scales.get(f"{head}.w3.{leaf}") if part and leaf in TENSOR_SCALES[:2] else None
        if w3 is None or not all(math.isfinite(w) and w > 0 for w in (w1, w3)):
            continue
        ratio = w3 / w1 if leaf == "weight_scale_2" else w1 / w3
        ratios[f"{ratio:.6g}"] += 1
        rounded += math.frexp(ratio)[0] != 0.5
    report.w3_over_w1 = Counter(dict(ratios.most_common(20)))
    if rounded:
        report.add(
            "values",
            f"{rounded} experts: the tensor scales of w1 and w3 differ by no power of two, so that the engine rounds "
            "block scales of one half once to e4m3.",
            error=False,
        )
