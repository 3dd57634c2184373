# SPDX-License-Identifier: Apache-2.0
"""Reading the headers of a folder of safetensors files, and nothing else of them.

What a file must be (https://github.com/huggingface/safetensors, "Format"):

- 8 bytes, little endian: the header's length, at most 100 MB;
- the header MUST be UTF-8 JSON that starts with ``{``, without duplicate keys;
- each tensor has a dtype, a shape and ``data_offsets`` that span exactly its bytes;
- tensors MUST cover the rest of the file: no hole, no overlap, nothing behind.

Files come from strangers. Types are checked while parsing, by msgspec, so that nested or
endless values are never built; sizes and kinds of files are checked before reading.
"""

import gc
import json
import math
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from vllm.checkpoint.errors import CheckpointError

__all__ = ["DTYPE_BITS", "INDEX", "Entry", "read_header", "read_headers", "read_json"]

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MAX_ITEM_BYTES = 10_000  # a million dimensions are an attack
MAX_INDEX_BYTES = 500_000_000  # a million tensors take 120 MB
MAX_JSON_BYTES = 32_000_000  # a config that lists every expert's every linear takes 27 MB

DTYPE_BITS = {
    "F4": 4,
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
}


class Entry(NamedTuple):
    """A tensor as its file's header describes it.

    Attributes:
        file: Name of the file within the folder.
        dtype: safetensors' spelling, a key of `DTYPE_BITS`.
        shape: Elements per dimension.
        start: Where its bytes start, counted from the start of the file.
        nbytes: How many there are.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


_Size = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class _Info(msgspec.Struct, gc=False, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[_Size, ...]
    data_offsets: tuple[_Size, _Size]


_HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
_INFO = msgspec.json.Decoder(_Info)
_STRINGS = msgspec.json.Decoder(dict[str, str])


def _read(path: Path, limit: int, prefix: bool = False) -> tuple[bytes, int]:
    """A regular file's content (with `prefix`, its safetensors header) and its size.

    Raises:
        CheckpointError: It cannot be opened, is no regular file, or is too large.
    """
    try:
        # A pipe would block the open for ever.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be opened ({getattr(error, 'strerror', None) or error}).") from None
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path}: is no regular file.")
    with open(descriptor, "rb") as file:
        length, most = info.st_size, limit
        if prefix:
            length = int.from_bytes(file.read(8), "little")
            most = min(info.st_size - 8, limit)
            if length > most:
                raise CheckpointError(
                    f"{path}: its first 8 bytes announce a header of {length} bytes, but the file has "
                    f"{info.st_size} bytes and a header at most {limit}. It is truncated or no safetensors "
                    "file; fetch it again."
                )
        if length > most:
            raise CheckpointError(f"{path}: has {length} bytes, more than the {limit} that are read of such a file.")
        return file.read(length), info.st_size


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice!r} stands there twice")
    return found


def _parse(path: Path, what: str, text: bytes, decode: Callable[[bytes], Any]) -> Any:
    try:
        return decode(text)
    except (ValueError, RecursionError) as error:  # msgspec's errors are ValueErrors
        raise CheckpointError(f"{path}: {what} ({error}); fetch it again.") from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        CheckpointError: The file cannot be read, is too large, is no JSON object, or
            has a key twice.
    """
    text, _ = _read(path, MAX_JSON_BYTES)
    content = _parse(path, "is no JSON", text, lambda t: json.loads(t, object_pairs_hook=_refuse_duplicates))
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no JSON object.")
    return content


def _infos(text: bytes) -> dict[str, _Info]:
    if text[:1] != b"{":
        raise ValueError("it does not start with '{'")
    raw = _HEADER.decode(text)
    metadata = raw.pop("__metadata__", None)
    if metadata is not None:
        _STRINGS.decode(metadata)
    for name, item in raw.items():
        if len(memoryview(item)) > MAX_ITEM_BYTES:
            raise ValueError(f"what it says about {name} has more than {MAX_ITEM_BYTES} bytes")
    infos = {name: _INFO.decode(item) for name, item in raw.items()}
    # msgspec keeps the last of equal keys. Each tensor brings each of its three keys at
    # least once, so these counts can only be right if nothing stands there twice.
    keys = (b'"dtype"', b'"shape"', b'"data_offsets"')
    if b"\\" in text or any(text.count(key) != len(infos) for key in keys) or text.count(b'"__metadata__"') > 1:
        json.loads(text, object_pairs_hook=_refuse_duplicates)
    return infos


def read_header(path: Path) -> dict[str, Entry]:
    """Entries of one file, after checking that the file holds what they claim.

    Raises:
        CheckpointError: The file cannot be opened, is shorter than its header says, the
            header is not of the right form, or tensors do not cover the file exactly.
    """
    text, size = _read(path, MAX_HEADER_BYTES, prefix=True)
    infos = _parse(path, "its header is no safetensors header", text, _infos)
    data, file = 8 + len(text), path.name
    known: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], int]] = {}  # equal ones become one object
    entries = {}
    for name, info in infos.items():
        begin, end = info.data_offsets
        key = (info.dtype, info.shape)
        if key not in known:
            known[key] = (*key, _nbytes(path, name, *key))
        dtype, shape, nbytes = known[key]
        if end - begin != nbytes:
            raise CheckpointError(
                f"{path}: tensor {name} of {dtype} {list(shape)} takes {nbytes} bytes, but its offsets "
                f"{begin}..{end} span {end - begin}."
            )
        entries[name] = Entry(file, dtype, shape, data + begin, nbytes)
    last = data
    for entry in entries.values():  # nearly always in order already
        if entry.start != last:
            last = _end_of_sorted(path, entries, data)
            break
        last += entry.nbytes
    if last != size:
        raise CheckpointError(
            f"{path}: the file has {size} bytes, its header describes {last}. "
            "It is truncated or was appended to; fetch it again."
        )
    return entries


def _nbytes(path: Path, name: str, dtype: str, shape: tuple[int, ...]) -> int:
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        raise CheckpointError(f"{path}: tensor {name} has the unknown dtype {dtype!r}.")
    count = 0 if 0 in shape else math.prod(shape)
    if count >= 1 << 63:  # also too long to print
        raise CheckpointError(f"{path}: tensor {name} of {dtype} has the shape {list(shape[:8])}, beyond any file.")
    if count * bits % 8:
        raise CheckpointError(f"{path}: tensor {name} of {dtype} {list(shape)} does not end on a byte.")
    return count * bits // 8


def _end_of_sorted(path: Path, entries: dict[str, Entry], data: int) -> int:
    """Where the last tensor ends, if they cover the data that starts at `data`."""
    last = data
    for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if entry.start != last:
            raise CheckpointError(
                f"{path}: tensor {name} starts at byte {entry.start - data} of the data, but the one before it ends at "
                f"{last - data}: tensors overlap or leave a hole. No safetensors writer does that; fetch it again."
            )
        last += entry.nbytes
    return last


def _index_map(text: bytes) -> dict[str, str]:
    top = _HEADER.decode(text)
    if "weight_map" not in top or text.count(b'"weight_map"') > 1:
        raise ValueError("it must have the key 'weight_map' once")
    inner = bytes(top["weight_map"])
    weight_map = _STRINGS.decode(inner)
    if b"\\" in inner or inner.count(b'"') != 4 * len(weight_map):  # as in _infos
        json.loads(inner, object_pairs_hook=_refuse_duplicates)
    return weight_map


def _weight_map(index: Path) -> dict[str, str]:
    text, _ = _read(index, MAX_INDEX_BYTES)
    weight_map = _parse(index, "is no index with a weight_map", text, _index_map)
    for shard in set(weight_map.values()):
        if shard != os.path.basename(shard) or shard in ("", ".", "..") or "\0" in shard:
            raise CheckpointError(
                f"{index}: names the shard {shard!r}, which is not in the folder. Shards lie beside their index."
            )
    return weight_map


def read_headers(folder: Path) -> dict[str, Entry]:
    """Entries of all tensors in a checkpoint folder, through its index if it has one.

    Raises:
        CheckpointError: No weights, a shard that the index names is missing, the index
            and the shards disagree about a tensor, or one of `read_header`'s.
    """
    collecting = gc.isenabled()
    gc.disable()  # half a million new tuples, none of them garbage: a third of the time
    try:
        return _read_headers(folder)
    finally:
        if collecting:
            gc.enable()


def _read_headers(folder: Path) -> dict[str, Entry]:
    index = folder / INDEX
    entries: dict[str, Entry] = {}
    if not os.path.lexists(index):
        shards = sorted(path.name for path in folder.glob("*.safetensors"))
        if not shards:
            raise CheckpointError(f"{folder}: holds no *.safetensors file.")
        weight_map = None
    else:
        weight_map = _weight_map(index)
        shards = sorted(set(weight_map.values()))
        missing = [shard for shard in shards if not os.path.lexists(folder / shard)]
        if missing or not shards:
            raise CheckpointError(
                f"{index}: names {len(shards)} shards, of which {len(missing)} are not in the folder: "
                f"{', '.join(missing[:5])}. Fetch them."
            )
    for shard in shards:
        found = read_header(folder / shard)
        twice = entries.keys() & found.keys()
        if twice:
            name = min(twice)
            raise CheckpointError(
                f"{folder}: {len(twice)} tensors are both in {entries[name].file} and in {shard}, such as {name}. "
                "The files belong to different checkpoints; remove those that do not belong here."
            )
        entries.update(found)
    if weight_map is None:
        return entries
    for name, shard in weight_map.items():
        entry = entries.get(name)
        if entry is None or entry.file != shard:
            where = f"it is in {entries[name].file}" if name in entries else "no shard holds it"
            raise CheckpointError(f"{index}: says that {name} is in {shard}, but {where}.")
    unlisted = [name for name in entries if name not in weight_map]
    if unlisted:
        raise CheckpointError(
            f"{index}: does not list {len(unlisted)} tensors that the shards hold, such as {unlisted[0]} in "
            f"{entries[unlisted[0]].file}. Index and shards belong to different checkpoints."
        )
    return entries
