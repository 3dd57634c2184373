# SPDX-License-Identifier: Apache-2.0
"""Reading the headers of a folder of safetensors files, and nothing else of them."""

import json
from dataclasses import dataclass
from pathlib import Path

from vllm.checkpoint.errors import CheckpointError

__all__ = ["DTYPE_BITS", "Entry", "read_header", "read_headers"]

INDEX = "model.safetensors.index.json"
MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit

DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("U16", "I16", "F16", "BF16"), 16),
    **dict.fromkeys(("U32", "I32", "F32"), 32),
    **dict.fromkeys(("U64", "I64", "F64", "C64"), 64),
    "F4": 4,
}


@dataclass(frozen=True)
class Entry:
    """A tensor as its file's header describes it.

    Attributes:
        file: Name of the file within the folder.
        dtype: safetensors' spelling, a key of `DTYPE_BITS`.
        shape: Elements per dimension.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]


def read_header(path: Path) -> dict[str, Entry]:
    """Entries of one file, after checking that the file holds what they claim.

    Raises:
        CheckpointError: The file is shorter than its header says, the header is
            not JSON of the right form, or a tensor's bytes do not fit its shape.
    """
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
            raise CheckpointError(
                f"{path}: its first 8 bytes announce a header of {length} bytes, but the file has {size} bytes. "
                "It is truncated or no safetensors file; fetch it again."
            )
        try:
            header = json.loads(file.read(length).decode())
            header.pop("__metadata__", None)
            raw = {
                name: (item["dtype"], tuple(item["shape"]), *item["data_offsets"]) for name, item in header.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise CheckpointError(f"{path}: its header is no safetensors header ({error}); fetch it again.") from None
    entries = {}
    last = 0
    for name, (dtype, shape, begin, end) in raw.items():
        bits = DTYPE_BITS.get(dtype)
        if bits is None:
            raise CheckpointError(f"{path}: tensor {name} has the unknown dtype {dtype!r}.")
        want = bits
        for n in shape:
            want *= n
        if (end - begin) * 8 != want or begin < 0:
            raise CheckpointError(
                f"{path}: tensor {name} of {dtype} {list(shape)} takes {want // 8} bytes, but its offsets "
                f"{begin}..{end} span {end - begin}."
            )
        last = max(last, end)
        entries[name] = Entry(path.name, dtype, shape)
    if 8 + length + last != size:
        raise CheckpointError(
            f"{path}: the file has {size} bytes, its header describes {8 + length + last}. "
            "It is truncated or was appended to; fetch it again."
        )
    return entries


def read_headers(folder: Path) -> dict[str, Entry]:
    """Entries of all tensors in a checkpoint folder, through its index if it has one.

    Raises:
        CheckpointError: No weights, a shard that the index names is missing, or
            the index and the shards disagree about a tensor.
    """
    index = folder / INDEX
    if not index.exists():
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise CheckpointError(f"{folder}: holds no *.safetensors file.")
        return {name: entry for file in files for name, entry in read_header(file).items()}
    try:
        weight_map = dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{index}: is no index with a weight_map ({error}).") from None
    shards = sorted(set(weight_map.values()))
    missing = [shard for shard in shards if not (folder / shard).is_file()]
    if missing:
        raise CheckpointError(
            f"{index}: names {len(shards)} shards, of which {len(missing)} are not in the folder: "
            f"{', '.join(missing[:5])}. Fetch them."
        )
    entries = {name: entry for shard in shards for name, entry in read_header(folder / shard).items()}
    for name, shard in weight_map.items():
        if name not in entries or entries[name].file != shard:
            found = f"it is in {entries[name].file}" if name in entries else "no shard holds it"
            raise CheckpointError(f"{index}: says that {name} is in {shard}, but {found}.")
    unlisted = [name for name in entries if name not in weight_map]
    if unlisted:
        raise CheckpointError(
            f"{index}: does not list {len(unlisted)} tensors that the shards hold, such as {unlisted[0]} in "
            f"{entries[unlisted[0]].file}. Index and shards belong to different checkpoints."
        )
    return entries
