# SPDX-License-Identifier: Apache-2.0
"""Safetensors headers from strangers: each fault has its error, and nothing crashes, hangs or fills the memory."""

import json
import os
import re
import struct
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open

from vllm.checkpoint.errors import CheckpointError
from vllm.checkpoint.headers import read_header, read_headers, read_json

INDEX = "model.safetensors.index.json"


def item(dtype="U8", shape=(4,), offsets=(0, 4), **more):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets), **more}


def blob(header, data=4, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


FILES = {
    "empty file": (b"", "announce a header of 0 bytes, but the file has 0"),
    "header beyond the file": (blob({}, length=1 << 20), "announce a header of 1048576 bytes"),
    "header length of 2^64 - 1": (blob({}, length=(1 << 64) - 1), "announce a header of 18446744073709551615"),
    "no JSON": (blob(b"{"), "no safetensors header"),
    "blank before the JSON": (blob(b" " + json.dumps({"a": item()}).encode()), "does not start with '{'"),
    "a list": (blob(b"[1, 2]"), "does not start with '{'"),
    "bad UTF-8 in a name": (blob(json.dumps({"a": item()}).encode().replace(b'"a"', b'"\xff"')), "UTF-8|utf-8"),
    "deeply nested": (blob(b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"), "no safetensors header"),
    "deeply nested, inside a known key": (
        blob(b'{"a":{"dtype":"U8","data_offsets":[0,4],"shape":' + b"[" * 50_000 + b"]" * 50_000 + b"}}"),
        "no safetensors header",
    ),
    "a tensor twice": (
        blob(b'{"a":%s,"a":%s}' % ((json.dumps(item()).encode(),) * 2)),
        "the key 'a' stands there twice",
    ),
    "a tensor twice, once escaped": (
        blob(b'{"a":%s,"\\u0061":%s}' % ((json.dumps(item()).encode(),) * 2)),
        "the key 'a' stands there twice",
    ),
    "a field twice": (
        blob(b'{"a":{"dtype":"F32","dtype":"U8","shape":[4],"data_offsets":[0,4]}}'),
        "the key 'dtype' stands there twice",
    ),
    "metadata twice": (
        blob(b'{"__metadata__":{},"__metadata__":{},"a":%s}' % json.dumps(item()).encode()),
        "'__metadata__' stands there twice",
    ),
    "metadata that is no text": (blob({"__metadata__": {"a": 1}, "a": item()}), "Expected `str`, got `int`"),
    "unknown dtype": (blob({"a": item("F5")}), "tensor a has the unknown dtype 'F5'"),
    "unknown field": (blob({"a": item(stride=1)}), "unknown field `stride`"),
    "missing field": (blob({"a": {"dtype": "U8", "shape": [4]}}), "missing required field `data_offsets`"),
    "negative size": (blob({"a": item(shape=(-4,))}), "Expected `int` >= 0"),
    "fractional size": (blob({"a": item(shape=(4.5,))}), "Expected `int`, got `float`"),
    "true as a size": (blob({"a": item(shape=(True, 4))}), "Expected `int`, got `bool`"),
    "a size of 2^64": (blob({"a": item(shape=(1 << 64,))}), "no safetensors header"),
    "a product beyond 2^64": (blob({"a": item(shape=(1 << 40, 1 << 40))}), r"tensor a of U8 .* beyond any file"),
    "many sizes": (blob({"a": item(shape=(1 << 62,) * 400)}), r"tensor a of U8 .*\[(\d+, ){7}\d+\], beyond"),
    "a million sizes": (blob({"a": item(shape=(1,) * 1_000_000)}), "what it says about a has more than 10000 bytes"),
    "negative offset": (blob({"a": item(offsets=(-4, 0))}), "Expected `int` >= 0"),
    "end before start": (blob({"a": item(shape=(0,), offsets=(4, 0))}), "offsets 4..0 span -4"),
    "offsets that do not fit the shape": (blob({"a": item(offsets=(0, 3))}), r"takes 4 bytes, but .* 0\.\.3 span 3"),
    "offsets beyond the file": (blob({"a": item(shape=(8,), offsets=(0, 8))}), "the file has .* describes"),
    "far beyond": (blob({"a": item(shape=(1 << 50,), offsets=(0, 1 << 50))}), r"\[1125899906842624\] takes|describes"),
    "overlap": (
        blob({"a": item(), "b": item(offsets=(2, 6))}, data=6),
        "tensor b starts at byte 2 of the data, but the one before it ends at 4: tensors overlap",
    ),
    "two tensors on the same bytes": (blob({"a": item(), "b": item()}), "tensors overlap"),
    "hole": (blob({"a": item(), "b": item(offsets=(6, 10))}, data=10), "tensor b .* leave a hole"),
    "hole at the start": (blob({"a": item(offsets=(4, 8))}, data=8), "tensor a .* leave a hole"),
    "bytes behind the last tensor": (blob({"a": item()}, data=9), "was appended to"),
    "half a byte": (blob({"a": item("F4", (3,), (0, 2))}, data=2), r"tensor a of F4 \[3\] does not end on a byte"),
}


@pytest.mark.parametrize("case", FILES)
def test_a_hostile_file_has_its_error(tmp_path, case):
    content, message = FILES[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert re.search(message, str(caught.value)), str(caught.value)
    assert len(str(caught.value)) < 1000


def good_folder(folder):
    (folder / "a.safetensors").write_bytes(blob({"a": item()}))
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "a.safetensors"}}))


def index(weight_map):
    return lambda f: (f / INDEX).write_text(weight_map if isinstance(weight_map, str) else json.dumps(weight_map))


def link(target):
    def spoil(folder):
        (folder / "a.safetensors").unlink()
        (folder / "a.safetensors").symlink_to(target)

    return spoil


def replace_by(make):
    def spoil(folder):
        (folder / "a.safetensors").unlink()
        make(folder / "a.safetensors")

    return spoil


FOLDERS = {
    "symlink loop": (link("a.safetensors"), "a.safetensors: cannot be opened .*symbolic links"),
    "dangling symlink": (link("nowhere"), "a.safetensors: cannot be opened .*No such file"),
    "device": (link("/dev/zero"), "a.safetensors: is no regular file"),
    "pipe": (replace_by(os.mkfifo), "a.safetensors: is no regular file"),
    "folder": (replace_by(os.mkdir), "a.safetensors: is no regular file"),
    "index that loops": (
        lambda f: ((f / INDEX).unlink(), (f / INDEX).symlink_to(INDEX)),
        "index.json: cannot be opened",
    ),
    "shard above the folder": (index({"weight_map": {"a": "../a.safetensors"}}), "'../a.safetensors', which is not in"),
    "absolute shard": (index({"weight_map": {"a": "/etc/passwd"}}), "'/etc/passwd', which is not in the folder"),
    "shard named ..": (index({"weight_map": {"a": ".."}}), "which is not in the folder"),
    "shard with a NUL": (index({"weight_map": {"a": "a\0"}}), "which is not in the folder"),
    "shard that is a number": (index({"weight_map": {"a": 1}}), "Expected `str`, got `int`"),
    "no weight_map": (index({"weights": {}}), "must have the key 'weight_map' once"),
    "weight_map twice": (
        index('{"weight_map":{"a":"a.safetensors"},"weight_map":{}}'),
        "must have the key 'weight_map' once",
    ),
    "a name twice": (
        index('{"weight_map":{"a":"a.safetensors","a":"b.safetensors"}}'),
        "the key 'a' stands there twice",
    ),
    "empty weight_map": (index({"weight_map": {}}), "names 0 shards"),
    "nested index": (index("[" * 100_000), "is no index with a weight_map"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_a_hostile_folder_has_its_error(tmp_path, case):
    spoil, message = FOLDERS[case]
    good_folder(tmp_path)
    read_headers(tmp_path)
    spoil(tmp_path)
    with pytest.raises(CheckpointError) as caught:
        read_headers(tmp_path)
    assert re.search(message, str(caught.value)), str(caught.value)


def test_one_tensor_in_two_files_is_refused(tmp_path):
    for name in "ab":
        (tmp_path / f"{name}.safetensors").write_bytes(blob({"w": item()}))
    with pytest.raises(CheckpointError, match="1 tensors are both in a.safetensors and in b.safetensors, such as w"):
        read_headers(tmp_path)


def test_shards_may_be_links_to_elsewhere(tmp_path):
    """The hub's cache is folders of links to blobs beside them."""
    good_folder(tmp_path)
    (tmp_path / "a.safetensors").rename(tmp_path / "blob")
    (tmp_path / "a.safetensors").symlink_to("blob")
    assert read_headers(tmp_path)["a"].file == "a.safetensors"


# --- fuzzing --------------------------------------------------------------------------

NAMES = st.text(max_size=8) | st.sampled_from(["a", "b", "__metadata__", '"data_offsets"', "\\u0061"])
NUMBERS = st.integers(-2, 9) | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.booleans()
JSON = st.recursive(
    st.none() | NUMBERS | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
ITEM = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["U8", "BF16", "F32", "F8_E4M3", "F4", "F6_E2M3"]) | JSON,
        "shape": st.lists(st.integers(0, 4), max_size=3) | st.lists(NUMBERS, max_size=5) | JSON,
        "data_offsets": st.tuples(st.integers(0, 12), st.integers(0, 12)) | st.lists(NUMBERS, max_size=3) | JSON,
    },
    optional={"more": JSON},
)
PAIRS = st.lists(st.tuples(NAMES, ITEM | JSON), max_size=5)


def render(pairs):
    """JSON whose keys may repeat."""
    return ("{" + ",".join(f"{json.dumps(k)}:{json.dumps(v)}" for k, v in pairs) + "}").encode()


@st.composite
def good_files(draw):
    """A valid file, so that mutations start near what is accepted."""
    header, end = {}, 0
    for name in draw(st.lists(st.text(max_size=6).filter(lambda n: n != "__metadata__"), max_size=4, unique=True)):
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        size = 2
        for n in shape:
            size *= n
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    if draw(st.booleans()):
        header["__metadata__"] = {"format": "pt"}
    return blob(header, data=end)


@st.composite
def mutated(draw):
    content = bytearray(draw(good_files()))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(content)))
        piece = draw(st.binary(max_size=3) | st.sampled_from([b"{", b"}", b"[", b'"', b",", b"\\", b"9", b"-", b"\0"]))
        content[at : at + draw(st.integers(0, 3))] = piece
    return bytes(content)


def accepts(path):
    """Whether we read a file; whatever we refuse, we refuse with our own error."""
    try:
        entries = read_header(path)
    except CheckpointError:
        return None
    return entries


FUZZ = settings(max_examples=400, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])


@FUZZ
@given(content=mutated() | st.builds(lambda p, n: blob(render(p), data=n), PAIRS, st.integers(0, 12)) | st.binary())
def test_what_we_accept_the_library_reads_alike(tmp_path, content):
    path = tmp_path / "fuzz.safetensors"
    path.write_bytes(content)
    entries = accepts(path)
    if entries is None:
        return
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(entries)
        for name, entry in entries.items():
            assert tuple(file.get_slice(name).get_shape()) == entry.shape
            assert file.get_slice(name).get_dtype() == entry.dtype


@FUZZ
@given(content=good_files())
def test_a_valid_file_is_accepted(tmp_path, content):
    path = tmp_path / "good.safetensors"
    path.write_bytes(content)
    try:
        with safe_open(path, "pt"):
            pass
    except SafetensorError:
        pytest.fail("the file is not valid to begin with")
    assert accepts(path) is not None


@FUZZ
@given(text=st.binary(max_size=60) | JSON.map(lambda v: json.dumps(v).encode()))
def test_any_index_and_any_json_is_read_or_refused(tmp_path, text):
    (tmp_path / "a.safetensors").write_bytes(blob({"a": item()}))
    (tmp_path / INDEX).write_bytes(text)
    for read in (lambda: read_headers(tmp_path), lambda: read_json(tmp_path / INDEX)):
        try:
            read()
        except CheckpointError:
            pass


BOMBS = """
import resource, struct, sys, time
from pathlib import Path
from vllm.checkpoint.errors import CheckpointError
from vllm.checkpoint.headers import read_header, read_headers
folder = Path(sys.argv[1])
most = 99_000_000
bombs = {
    "lists": b'{"a":[' + b"[],"* (most // 3) + b"[]]}",
    "numbers": b'{"a":{"dtype":"U8","data_offsets":[0,4],"shape":[' + b"1," * (most // 2) + b"1]}}",
    "objects": b"{" + b'"a":{},' * (most // 7) + b'"a":{}}',
    "depth": b'{"a":' + b"[" * most,
    "string": b'{"a":"' + b"x" * most + b'"}',
}
for name, text in bombs.items():
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    (folder / "i").mkdir(exist_ok=True)
    (folder / "i" / "model.safetensors.index.json").write_bytes(text.replace(b'"a"', b'"weight_map"', 1))
    for read, path in ((read_header, folder / "model.safetensors"), (read_headers, folder / "i")):
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        try:
            read(path)
            print(name, "accepted")
        except CheckpointError:
            pass
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        print(name, read.__name__, grown // 1024, "MiB", round(time.monotonic() - start, 1), "s")
"""


def test_a_gigantic_header_takes_neither_memory_nor_time(tmp_path):
    """Python's own parser takes 2 GB and more for some of these 99 MB headers."""
    done = subprocess.run([sys.executable, "-c", BOMBS, str(tmp_path)], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split() for line in done.stdout.splitlines() if " MiB " in line]
    assert len(lines) == 10 and "accepted" not in done.stdout, done.stdout
    # The text itself is 95 MiB and is held up to four times.
    for name, read, grown, _, seconds, _ in lines:
        assert int(grown) < 450 and float(seconds) < 10, f"{name} {read}: {grown} MiB, {seconds} s"
