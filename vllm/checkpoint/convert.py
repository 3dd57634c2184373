# SPDX-License-Identifier: Apache-2.0
"""Rewrite a Kimi K3 checkpoint in another format, one shard at a time.

Each shard of the result holds the modules of one shard of the source. Its header follows
from the plan, so weights are converted in slabs of rows and written in place; nothing as
large as a tensor is held. A shard is written under a hidden name, synced and renamed, and
config and index come last: what is there is complete, and a killed run goes on where it
stopped.
"""

import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from vllm.checkpoint import compressed, modelopt
from vllm.checkpoint.errors import CheckpointError, one_error
from vllm.checkpoint.formats import CT, INPUT_SCALES, closest, dialects, is_block_fp8
from vllm.checkpoint.headers import DTYPE_BITS, INDEX, Entry, read_headers
from vllm.checkpoint.model import Model, read_model
from vllm.checkpoint.recode import Loss, Recoder
from vllm.checkpoint.report import build, is_draft

__all__ = ["ATTENTIONS", "TARGETS", "convert"]

# Target -> algorithm of the experts, of FP8 attention.
_ALGOS: dict[str, tuple[str | None, str | None]] = {
    "nvfp4-modelopt": ("NVFP4", "FP8_PB_WO"),
    "nvfp4-ct": (CT + "NVFP4", CT + "FP8_BLOCK"),
    "bf16": (None, None),
}
TARGETS = tuple(_ALGOS)
ATTENTIONS = ("keep", "fp8-pb-wo", "bf16")
WORK = ".convert"  # what a run needs to go on; renamed away when it has ended
COPY = 32 << 20  # bytes copied together
_WRITTEN = (INDEX, "config.json", "hf_quant_config.json")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


@dataclass(frozen=True)
class Item:
    """A module on its way.

    Attributes:
        source: Its tensors' entries, by last part of the name.
        result: Name, dtype and shape of what is written, by last part of the name.
        algos: Algorithms before and after.
        partners: Codes and block scales of the MXFP4 weights that share a tensor scale
            with this one, itself included: an expert's w1 and w3.
    """

    module: str
    shape: tuple[int, ...]
    source: dict[str, Entry]
    result: dict[str, tuple[str, tuple[int, ...]]]
    algos: tuple[str | None, str | None]
    partners: tuple[tuple[Entry, Entry], ...] = ()

    @property
    def nbytes(self) -> int:
        """Of the result."""
        return sum(_nbytes(dtype, shape) for dtype, shape in self.result.values())


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def convert(
    source: Path, out: Path, to: str, attention: str | None = None, progress: bool = False
) -> dict[str, Any]:
    """Write `source` in another format, or finish what an earlier call began.

    Args:
        source: Folder of a checkpoint that `vllm checkpoint inspect` finds loadable.
        out: Folder to create.
        to: One of `TARGETS`.
        attention: One of `ATTENTIONS`; None keeps what there is, or is BF16 if all is.
        progress: Show a progress bar on standard error.

    Returns:
        What is written to the config as ``checkpoint_provenance``: source, options, loss.

    Raises:
        CheckpointError: The source would not load or has a format that cannot be
            converted so, `out` holds something else, or the disk is too small.
    """
    attention = attention or ("bf16" if to == "bf16" else "keep")
    if to == "bf16" and attention != "bf16":
        raise CheckpointError(f"--to bf16 writes all weights in BF16, so --attention {attention} has no place there.")
    model, entries = read_model(source), read_headers(source)
    report = build(model, entries)
    if report.errors:
        raise one_error(f"{source}: will not load, so it is not converted:", report.errors)
    fp8 = _attention_is_fp8(model) if attention == "keep" else attention == "fp8-pb-wo"
    shards = _plan(model, entries, to, fp8)
    if out.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{out}: is the source itself, or a folder in it. Choose another folder.")
    digest = hashlib.sha256()
    options = (str(source.resolve()), to, attention, version("vllm"))
    for part in (*options, json.dumps(model.config)):
        digest.update(part.encode())
    for item in sorted(entries.items()):
        digest.update(repr(item).encode())
    with _claimed(out, digest.hexdigest()) as work:
        _check_space(out, work, shards)
        loss = _write_shards(model, out, work, shards, progress)
        provenance = {
            "tool": f"vllm checkpoint convert --to {to} --attention {attention}",
            "version": version("vllm"),
            "source": source.resolve().name,
            "source_format": model.method,
            "source_headers_sha256": digest.hexdigest(),
            "loss": loss.as_json(),
        }
        _write_side_files(model, out, work, shards, to, fp8, provenance)
    return provenance


# --- planning -------------------------------------------------------------------------


def _attention_is_fp8(model: Model) -> bool:
    """Whether the source's attention is block FP8.

    Raises:
        CheckpointError: Only some of it is, or in another format.
    """
    algos = model.algos or {}
    found = {algos.get(n) for n, spec in model.specs.items() if compressed.algorithm(spec.kind, None, "fp8")}
    if len(found) > 1 or any(algo is not None and not is_block_fp8(algo) for algo in found):
        raise CheckpointError(
            f"{model.folder}: attention is stored as {sorted(map(str, found))}; only all of it in 128x128 FP8 blocks "
            "or none can be kept. Use --attention fp8-pb-wo or bf16."
        )
    return is_block_fp8(found.pop())


def _plan(model: Model, entries: Mapping[str, Entry], to: str, fp8: bool) -> dict[str, list[Item]]:
    """Shard -> its modules, in the order of the source's bytes.

    Raises:
        CheckpointError: A format that cannot be converted so.
    """
    if model.algos is None:
        raise CheckpointError(f"{model.folder}: quant_method {model.method} cannot be converted.")
    expert_algo, attention_algo = _ALGOS[to]
    left = dict(entries)
    shards: dict[str, list[Item]] = {}
    for name, spec in model.specs.items():
        before = model.algos.get(name)
        after = compressed.algorithm(spec.kind, expert_algo, attention_algo if fp8 else None)
        prefix, _, leaf = name.rpartition(".")
        if after and after.endswith("NVFP4") and not (before or "").endswith(("NVFP4", "MXFP4")):
            raise CheckpointError(
                f"{model.folder}: {name} is {before or 'not quantised'}; NVFP4 is written of NVFP4 and MXFP4. "
                "Quantise the checkpoint with nvidia-modelopt or llm-compressor."
            )
        modules = [prefix]
        if spec.kind.startswith("expert."):
            head, part = prefix.split(".experts.0.")
            modules = [f"{head}.experts.{expert}.{part}" for expert in range(model.experts)]
        published = dialects(after, spec.shape, leaf)[0].tensors
        result = {last: (dtypes[0], shapes[0]) for last, (dtypes, shapes) in published.items()}
        if after in INPUT_SCALES:
            result[INPUT_SCALES[after]] = ("F32", result.get("weight_global_scale", ("F32", ()))[1])
        choices = dialects(before, spec.shape, leaf)
        if not choices:
            raise CheckpointError(f"{model.folder}: {name} is stored as {before}, which cannot be converted.")
        for module in modules:
            dialect = closest(module, choices, entries)
            names = [*dialect.tensors, *filter(None, [INPUT_SCALES.get(before or "")])]
            found = {k: left.pop(f"{module}.{k}") for k in names if f"{module}.{k}" in left}
            written = result
            if after is None:
                stored = found[leaf] if before is None else None
                # What was BF16 or F32 stays what it was, surplus of A_log included.
                written = {leaf: (stored.dtype, stored.shape) if stored else ("BF16", spec.shape)}
            partners: tuple[tuple[Entry, Entry], ...] = ()
            if (before or "").endswith("MXFP4") and after is not None:
                halves = ("w1", "w3") if part in ("w1", "w3") else (part,)
                bank = module.rpartition(".")[0]
                partners = tuple(
                    (entries[f"{bank}.{half}.weight_packed"], entries[f"{bank}.{half}.weight_scale"]) for half in halves
                )
            item = Item(module, spec.shape, found, written, (before, after), partners)
            shards.setdefault(next(iter(found.values())).file, []).append(item)
    for name, entry in left.items():  # scales of the KV cache
        if not is_draft(name, model.text["num_hidden_layers"]):
            module, _, leaf = name.rpartition(".")
            item = Item(module, entry.shape, {leaf: entry}, {leaf: (entry.dtype, entry.shape)}, (None, None))
            shards.setdefault(entry.file, []).append(item)
    return {
        shard: sorted(items, key=lambda item: next(iter(item.source.values())).start)
        for shard, items in sorted(shards.items())
    }


def _header(items: list[Item]) -> tuple[bytes, dict[str, int], int]:
    """A shard's header with its length in front, where each tensor starts, and the file's size."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = {}, 0
    for item in items:
        for leaf, (dtype, shape) in item.result.items():
            size = _nbytes(dtype, shape)
            header[f"{item.module}.{leaf}"] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
            starts[f"{item.module}.{leaf}"] = end
            end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    data = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: data + at for name, at in starts.items()}, data + end


# --- writing --------------------------------------------------------------------------


@contextmanager
def _claimed(out: Path, digest: str) -> Iterator[Path]:
    """Create `out`, or take it over from a run that did not end; nobody else may write there meanwhile.

    Yields the folder for what is unfinished.
    """
    work = out / WORK
    if out.exists() and not work.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: exists already, and is no unfinished conversion. Choose another folder.")
    work.mkdir(parents=True, exist_ok=True)
    with open(work / "source", "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CheckpointError(f"{out}: another conversion is writing there.") from None
        file.seek(0)
        begun = file.read()
        if begun and begun != digest:
            raise CheckpointError(
                f"{out}: holds an unfinished conversion of another source or with other options. Remove it, or choose "
                "another folder."
            )
        if not begun:
            file.write(digest)
            file.flush()
        yield work
        done = work.rename(out / f"{WORK}.done")
    shutil.rmtree(done)


def _check_space(out: Path, work: Path, shards: Mapping[str, list[Item]]) -> None:
    need = sum(_header(items)[2] for shard, items in shards.items() if not (out / shard).exists())
    free = shutil.disk_usage(out).free + sum(f.stat().st_blocks * 512 for f in work.glob("*.safetensors"))
    if need > free:
        raise CheckpointError(
            f"{out}: the result needs {need / 2**30:.1f} GiB more, and {free / 2**30:.1f} GiB are free there."
        )


def _write_shards(
    model: Model, out: Path, work: Path, shards: Mapping[str, list[Item]], progress: bool
) -> Loss:
    total = Loss()
    sizes = {shard: _header(items)[2] for shard, items in shards.items()}
    bar = tqdm(
        total=sum(sizes.values()),
        initial=sum(size for shard, size in sizes.items() if (out / shard).exists()),
        unit="B",
        unit_scale=True,
        unit_divisor=1024,
        disable=None if progress else True,
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # one module per core goes faster than one operation on all
    try:
        # compressed-tensors compiles its rounding, which needs a C++ compiler.
        with torch.compiler.set_stance("force_eager"), bar, ThreadPoolExecutor(os.cpu_count()) as pool:
            for number, (shard, items) in enumerate(shards.items(), 1):
                bar.set_description(f"shard {number}/{len(shards)}")
                loss_file = work / f"{shard}.loss"
                if (out / shard).exists():
                    total.add(Loss.from_json(json.loads(loss_file.read_text())))
                    continue
                loss = _write_shard(model, work / shard, items, pool, bar.update)
                # The loss first: a shard under its own name is finished.
                _write_json(work, loss_file, loss.as_json())
                (work / shard).rename(out / shard)
                _sync(out)
                total.add(loss)
    finally:
        torch.set_num_threads(threads)
    return total


def _write_shard(
    model: Model, path: Path, items: list[Item], pool: ThreadPoolExecutor, advance: Callable[[int], object]
) -> Loss:
    header, starts, size = _header(items)
    loss = Loss()
    with open(path, "wb") as file, Sources(model.folder) as sources:
        file.write(header)
        file.truncate(size)
        file.flush()
        advance(len(header))
        recoder = Recoder(sources.read, sources.copy, file.fileno(), starts)

        def one(item: Item) -> Loss:
            if item.algos == (None, None):
                for leaf, entry in item.source.items():
                    sources.copy(entry, file.fileno(), starts[f"{item.module}.{leaf}"])
                return Loss()
            return recoder.recode(item)

        futures = {pool.submit(one, item): item for item in items}
        try:
            for done in as_completed(futures):
                loss.add(done.result())
                advance(futures[done].nbytes)
        except BaseException:
            for future in futures:
                future.cancel()
            raise
        os.fsync(file.fileno())
    return loss


class Sources:
    """The source's shards, opened once; reads need no lock, since each names its place."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, int] = {}

    def __enter__(self) -> "Sources":
        return self

    def __exit__(self, *_: object) -> None:
        for descriptor in self.files.values():
            os.close(descriptor)

    def _open(self, name: str) -> int:
        if name not in self.files:
            opened = os.open(self.folder / name, os.O_RDONLY)
            if self.files.setdefault(name, opened) != opened:  # another thread was faster
                os.close(opened)
        return self.files[name]

    def read(self, entry: Entry, start: int = 0, nbytes: int | None = None) -> bytearray:
        """Bytes of a tensor from `start` on."""
        buffer = bytearray(entry.nbytes - start if nbytes is None else nbytes)
        if os.preadv(self._open(entry.file), [buffer], entry.start + start) != len(buffer):
            raise CheckpointError(f"{self.folder / entry.file}: became shorter while it was read.")
        return buffer

    def copy(self, entry: Entry, target: int, at: int) -> None:
        """Copy a tensor to `at` of the file `target`, in the kernel where it can."""
        offset = 0
        while offset < entry.nbytes:
            size = min(COPY, entry.nbytes - offset)
            try:
                done = os.copy_file_range(
                    self._open(entry.file), target, size, entry.start + offset, at + offset
                )
            except OSError:  # not between these file systems
                done = 0
            offset += done or os.pwrite(target, self.read(entry, offset, size), at + offset)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_side_files(
    model: Model,
    out: Path,
    work: Path,
    shards: Mapping[str, list[Item]],
    to: str,
    fp8: bool,
    provenance: dict[str, Any],
) -> None:
    for path in sorted(model.folder.iterdir()):
        if path.name in _WRITTEN or path.name.startswith(".") or path.suffix in _WEIGHTS:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, out / path.name, symlinks=True, dirs_exist_ok=True)
        elif path.is_file():
            shutil.copy(path, out / path.name)
    weight_map = {
        f"{item.module}.{leaf}": shard for shard, items in shards.items() for item in items for leaf in item.result
    }
    total = sum(item.nbytes for items in shards.values() for item in items)
    _write_json(work, out / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
    config = json.loads(json.dumps(model.config))
    for part in (config, config.get("text_config") or {}):
        part.pop("quantization_config", None)
    if to == "nvfp4-modelopt":
        quant = modelopt.quantization_config(model.specs, "FP8_PB_WO" if fp8 else None)
        inner = {key: value for key, value in quant.items() if key != "quant_method"}
        _write_json(work, out / "hf_quant_config.json", {"producer": {"name": "modelopt"}, "quantization": inner})
    elif to == "nvfp4-ct":
        quant = compressed.quantization_config(model.specs, "NVFP4", "FP8_BLOCK" if fp8 else None)
    if to != "bf16":
        config["quantization_config"] = quant
    config["checkpoint_provenance"] = provenance
    _write_json(work, out / "config.json", config)


def _write_json(work: Path, path: Path, content: Any) -> None:
    """Write a whole file or none of it."""
    partial = work / "json"
    partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    _sync(partial)
    partial.rename(path)
