# SPDX-License-Identifier: Apache-2.0
"""Converted checkpoints hold the source's values; a killed conversion goes on; nothing is overwritten.

What values a file holds is asked of `tests.models.kimi_k3.reference`, which parses files by itself and shares no
code with vllm.
"""

import fcntl
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from hashlib import sha256
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.checkpoint.test_preflight import edit_config, edit_tensors
from tests.models.kimi_k3 import reference
from vllm.checkpoint.convert import convert
from vllm.checkpoint.errors import CheckpointError
from vllm.checkpoint.preflight import check_checkpoint
from vllm.checkpoint.ranks import Deployment
from vllm.checkpoint.recode import coarser
from vllm.checkpoint.tiny import make_tiny

pytest.importorskip("modelopt", reason="writes a quantised checkpoint: pip install 'vllm[quantize]'")

SOURCES = {
    "mxfp4": dict(format="mxfp4"),
    "modelopt": dict(format="nvfp4-modelopt"),
    "modelopt, bf16 attention": dict(format="nvfp4-modelopt", attention="bf16"),
    "modelopt, w3 at 4": dict(format="nvfp4-modelopt", w3_scale_ratio=4.0),
    "ct": dict(format="nvfp4-ct"),
    "ct, fp8 attention": dict(format="nvfp4-ct", attention="fp8"),
    "ct, w3 at 1/4": dict(format="nvfp4-ct", w3_scale_ratio=0.25),
    "fp8 blocks": dict(format="fp8-block-ct"),
    "multimodal": dict(format="mxfp4", arch="multimodal"),
}
W1 = "model.layers.1.block_sparse_moe.experts.2.w1"
W3 = W1.replace("w1", "w3")


@pytest.fixture(scope="module")
def sources(tmp_path_factory, shape):
    folder = tmp_path_factory.mktemp("sources")
    for name, options in SOURCES.items():
        make_tiny(folder / name, shape=shape, seed=2, **options)
    return folder


@pytest.fixture(autouse=True)
def several_slabs(monkeypatch):
    """Tensors of more than 128 rows or 1000 bytes go in pieces, as real ones do."""
    monkeypatch.setattr("vllm.checkpoint.recode.SLAB", 1)
    monkeypatch.setattr("vllm.checkpoint.convert.COPY", 1000)


def values(folder):
    return reference.dequantise(folder)


def stored(folder):
    return {k: v for shard in sorted(folder.glob("*.safetensors")) for k, v in load_file(shard).items()}


def hashes(folder):
    """Of all files, without the conversion's record."""
    found = {}
    for path in sorted(p for p in folder.rglob("*") if p.is_file()):
        content = path.read_bytes()
        if path.name == "config.json":
            config = json.loads(content)
            config.pop("checkpoint_provenance", None)
            content = json.dumps(config).encode()
        found[str(path.relative_to(folder))] = sha256(content).hexdigest()
    return found


@pytest.mark.parametrize("to", ["nvfp4-modelopt", "nvfp4-ct"])
@pytest.mark.parametrize("name", [name for name in SOURCES if name != "fp8 blocks"])
def test_nvfp4_of_nvfp4_and_mxfp4_is_bit_exact(sources, tmp_path, name, to):
    """PUBLIC_CASES 29 and 31: tensor scales that differ by a power of two, multipliers and divisors."""
    done = convert(sources / name, tmp_path / "out", to)
    assert {key: done["loss"][key] for key in ("lost_tensors", "rounded", "inexact_scales")} == dict.fromkeys(
        ("lost_tensors", "rounded", "inexact_scales"), 0
    )
    before, after = values(sources / name), values(tmp_path / "out")
    assert before.keys() == after.keys()
    for key in before:
        assert torch.equal(before[key], after[key]), key
    for tp in (1, 2):
        report = check_checkpoint(tmp_path / "out", Deployment(tp))
    assert report is not None
    layout = "NVFP4"
    assert report.kinds["expert.w1"].formats == {layout: report.kinds["expert.w1"].weights}


@pytest.mark.parametrize("name", SOURCES)
def test_bf16_is_the_values_rounded_once(sources, tmp_path, name):
    done = convert(sources / name, tmp_path / "out", "bf16")
    before, after = values(sources / name), stored(tmp_path / "out")
    assert before.keys() == after.keys()
    changed = 0
    for key, value in before.items():
        wide = after[key].dtype == torch.float32
        assert torch.equal(after[key], value if wide else value.bfloat16()), key
        changed += int((after[key].float() != value).sum())
    assert done["loss"]["rounded"] == changed
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config and "quantization_config" not in config.get("text_config", {})
    check_checkpoint(tmp_path / "out")


@pytest.mark.parametrize("to", ["nvfp4-modelopt", "nvfp4-ct"])
def test_attention_in_fp8_blocks_is_within_half_a_step(sources, tmp_path, to):
    """e4m3 has three mantissa bits; a block's largest value is at 448."""
    convert(sources / "mxfp4", tmp_path / "out", to, "fp8-pb-wo")
    before, after = values(sources / "mxfp4"), values(tmp_path / "out")
    changed = 0
    for key, value in before.items():
        attention = ".self_attn." in key and re.search(r"(_proj|_with_mqa)\.weight$", key)
        if not attention:
            assert torch.equal(value, after[key]), key
            continue
        blocks = torch.nn.functional.pad(value, (0, -value.shape[1] % 128, 0, -value.shape[0] % 128))
        amax = blocks.abs().unflatten(0, (-1, 128)).unflatten(2, (-1, 128)).amax((1, 3))
        smallest = (amax / 448 * 2.0**-9).repeat_interleave(128, 0).repeat_interleave(128, 1)
        step = torch.maximum(value.abs() * 2.0**-3, smallest[: value.shape[0], : value.shape[1]])
        assert bool(((after[key] - value).abs() <= step * 0.501).all()), key
        changed += 1
    assert changed > 20


def test_attention_can_become_bf16(sources, tmp_path):
    convert(sources / "modelopt", tmp_path / "out", "nvfp4-ct", "bf16")
    before, after = values(sources / "modelopt"), values(tmp_path / "out")
    for key in before:
        wanted = before[key].bfloat16().float() if ".self_attn." in key and "_proj" in key else before[key]
        assert torch.equal(wanted, after[key]), key


@pytest.mark.parametrize("name, there, back", [
    ("modelopt", "nvfp4-ct", "nvfp4-modelopt"),
    ("modelopt, bf16 attention", "nvfp4-ct", "nvfp4-modelopt"),
    ("ct, fp8 attention", "nvfp4-modelopt", "nvfp4-ct"),
])
def test_there_and_back_gives_the_same_bytes(sources, tmp_path, name, there, back):
    convert(sources / name, tmp_path / "there", there)
    convert(tmp_path / "there", tmp_path / "back", back)
    before, after = stored(sources / name), stored(tmp_path / "back")
    assert before.keys() == after.keys()
    for key in before:
        assert before[key].dtype == after[key].dtype and before[key].shape == after[key].shape, key
        assert torch.equal(before[key].view(torch.uint8), after[key].view(torch.uint8)) if before[key].ndim else (
            before[key] == after[key]), key
    configs = [json.loads((f / "config.json").read_text()) for f in (sources / name, tmp_path / "back")]
    assert configs[1].pop("checkpoint_provenance")["source"] == "there"
    assert configs[0] == configs[1]


def test_a_tensor_scale_without_exact_reciprocal_is_counted(tmp_path, shape):
    """PUBLIC_CASES 29, ratio 1.25: a divisor has another rounding than its multiplier."""
    make_tiny(tmp_path / "in", format="nvfp4-modelopt", shape=shape, w3_scale_ratio=1.25)
    done = convert(tmp_path / "in", tmp_path / "out", "nvfp4-ct")
    before, after = values(tmp_path / "in"), values(tmp_path / "out")
    inexact = 0
    for key in before:
        bound = before[key].abs() * 2.0**-22
        assert bool(((before[key] - after[key]).abs() <= bound).all()), key
        inexact += key.endswith("w3.weight") and ".experts." in key
    assert done["loss"]["inexact_scales"] == inexact > 0


# --- exponents that do not fit --------------------------------------------------------


@pytest.fixture
def wide(sources, tmp_path):
    """MXFP4 whose expert 2 has block exponents from 0 down to -40 below its largest."""

    def change(tensors):
        gen = torch.Generator().manual_seed(5)
        for name, top in ((W1, 120), (W3, 118)):
            scale = tensors[f"{name}.weight_scale"]
            tensors[f"{name}.weight_scale"] = (top - torch.randint(0, 41, scale.shape, generator=gen)).to(torch.uint8)
        scale = tensors[f"{W1}.weight_scale"]
        scale[0, 0] = 254  # a block of zeros, however large its scale, costs nothing
        tensors[f"{W1}.weight_packed"][0, :16] = 0x80
        scale[1, 0] = 0

    folder = shutil.copytree(sources / "mxfp4", tmp_path / "wide")
    edit_tensors(folder, change)
    return folder


@pytest.mark.parametrize("to", ["nvfp4-modelopt", "nvfp4-ct"])
def test_exponents_beyond_nvfp4_are_rounded_and_reported(wide, tmp_path, to):
    loss = convert(wide, tmp_path / "out", to)["loss"]
    before, after = values(wide), values(tmp_path / "out")
    scales = stored(wide)
    largest = 120  # of both halves, the block of zeros left out
    assert loss["lost_tensors"] == 2 == len(loss["lost"])
    for name in (W1, W3):
        old, new = before[f"{name}.weight"], after[f"{name}.weight"]
        gap = (largest - scales[f"{name}.weight_scale"].long()).repeat_interleave(32, 1)
        # The smallest block scale is 17 powers below the largest, and codes are halves there.
        step = 2.0 ** (largest - 127 - 17 - 1)
        assert torch.equal(old[gap <= 17], new[gap <= 17])
        assert bool(((old - new).abs()[gap > 17] <= step / 2).all())
        fits = (old.double() / step % 1 == 0) & (old.abs() / step <= 4)
        assert torch.equal(old[fits], new[fits]), "what fits is exact beyond the gap as well"
        assert loss["lost"][f"{name}.weight"] == int((old != new).sum()) > 0
    others = [key for key in before if not key.startswith((W1, W3))]
    assert all(torch.equal(before[key], after[key]) for key in others)


def test_gaps_are_counted_block_by_block(wide, tmp_path):
    loss = convert(wide, tmp_path / "out", "nvfp4-ct")["loss"]
    scales = stored(wide)
    counts: dict[int, int] = {}
    for name, scale in scales.items():
        if not name.endswith("weight_scale"):
            continue
        pair = [name] if ".w2." in name else [name.replace(".w3.", ".w1."), name.replace(".w1.", ".w3.")]
        largest = 120 if name.startswith((W1, W3)) else max(int(scales[n].max()) for n in pair)
        for value in scale.flatten().tolist():
            counts[largest - value] = counts.get(largest - value, 0) + 1
    assert {int(gap): count for gap, count in loss["gaps"].items()} == counts


def test_coarser_codes_round_to_nearest_even():
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    grid = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for k in range(8):
        new, changed = coarser(codes, torch.full((16, 1), k), 32)
        count = 0
        for old_byte, new_byte in zip(codes.flatten().tolist(), new.flatten().tolist()):
            for shift in (0, 4):
                old, got = old_byte >> shift & 15, new_byte >> shift & 15
                want = grid[old & 7] / 2**k
                near = min(abs(g - want) for g in grid)
                best = [c for c in range(8) if abs(grid[c] - want) == near]
                assert got & 7 == next(c for c in best if len(best) == 1 or c % 2 == 0)
                assert got & 8 == old & 8
                count += grid[got & 7] * 2**k != grid[old & 7]
        assert changed == count


# --- what is refused ------------------------------------------------------------------


def test_nan_block_scales_are_refused(sources, tmp_path):
    folder = shutil.copytree(sources / "mxfp4", tmp_path / "in")
    edit_tensors(folder, lambda t: t[f"{W1}.weight_scale"].view(-1)[5:7].fill_(255))
    for to in ("nvfp4-ct", "bf16"):
        with pytest.raises(CheckpointError, match=f"{W1}.weight_scale in .*: 2 block scales are NaN"):
            convert(folder, tmp_path / to, to)
        assert not (tmp_path / to / "config.json").exists()


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), -1.0])
def test_tensor_scales_that_are_none_are_refused(sources, tmp_path, value):
    """PUBLIC_CASES 30."""
    folder = shutil.copytree(sources / "modelopt", tmp_path / "in")
    edit_tensors(folder, lambda t: t[f"{W1}.weight_scale_2"].fill_(value))
    with pytest.raises(CheckpointError, match=f"{W1}.weight_scale_2 in .*expected > 0"):
        convert(folder, tmp_path / "out", "nvfp4-ct")


def test_what_would_not_load_is_not_converted(sources, tmp_path):
    folder = shutil.copytree(sources / "mxfp4", tmp_path / "in")
    edit_tensors(folder, lambda t: t.pop(f"{W1}.weight_scale"))
    with pytest.raises(CheckpointError, match=f"will not load.*\n.*{W1}.weight_scale: missing"):
        convert(folder, tmp_path / "out", "bf16")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "name, to, attention, message",
    [
        ("fp8 blocks", "nvfp4-ct", None, "w1.weight is not quantised; NVFP4 is written of NVFP4 and MXFP4"),
        ("modelopt", "bf16", "fp8-pb-wo", "--to bf16 writes all weights in BF16"),
    ],
)
def test_impossible_conversions_are_refused(sources, tmp_path, name, to, attention, message):
    with pytest.raises(CheckpointError, match=message):
        convert(sources / name, tmp_path / "out", to, attention)
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(sources, tmp_path):
    source = sources / "modelopt"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("mine")
    for out in (tmp_path / "mine", source, source / "inside"):
        out.mkdir(exist_ok=True)
        before = hashes(out)
        with pytest.raises(CheckpointError, match="exists already|is the source itself, or a folder in it"):
            convert(source, out, "nvfp4-ct")
        assert hashes(out) == before
    (source / "inside").rmdir()
    convert(source, tmp_path / "done", "nvfp4-ct")
    with pytest.raises(CheckpointError, match="exists already"):
        convert(source, tmp_path / "done", "nvfp4-ct")


def test_two_at_once_and_another_source_are_refused(sources, tmp_path, monkeypatch):
    out = tmp_path / "out"
    monkeypatch.setattr(
        "vllm.checkpoint.convert._write_shards", lambda *_: (_ for _ in ()).throw(RuntimeError("stopped"))
    )
    with pytest.raises(RuntimeError, match="stopped"):
        convert(sources / "ct", out, "nvfp4-modelopt")
    monkeypatch.undo()
    with open(out / ".convert" / "source") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(CheckpointError, match="another conversion is writing there"):
            convert(sources / "ct", out, "nvfp4-modelopt")
    for name, to in (("mxfp4", "nvfp4-modelopt"), ("ct", "bf16")):
        with pytest.raises(CheckpointError, match="unfinished conversion of another source or with other options"):
            convert(sources / name, out, to)
    convert(sources / "ct", out, "nvfp4-modelopt")
    assert not list(out.glob(".*"))


def test_too_small_a_disk_is_noticed_first(sources, tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(CheckpointError, match=r"the result needs 0\.0 GiB more, and 0\.0 GiB are free"):
        convert(sources / "mxfp4", tmp_path / "out", "bf16")
    assert not list((tmp_path / "out").glob("*.safetensors"))


# --- what comes along -----------------------------------------------------------------


def test_side_files_come_along_and_provenance_is_recorded(sources, tmp_path):
    folder = shutil.copytree(sources / "mxfp4", tmp_path / "in")
    (folder / "figures").mkdir()
    (folder / "figures" / "a.png").write_bytes(b"png")
    (folder / "old.bin").write_bytes(b"weights of another format")
    done = convert(folder, tmp_path / "out", "nvfp4-modelopt", "bf16")
    names = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    side = {p.name for p in folder.iterdir() if p.is_file() and p.suffix in (".json", ".jinja", ".py")}
    assert side | {"figures/a.png", "hf_quant_config.json"} <= names and "old.bin" not in names
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (folder / name).read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["checkpoint_provenance"] == json.loads(json.dumps(done))
    assert done["source"] == "in" and done["source_format"] == "compressed-tensors, mxfp4-pack-quantized"
    assert done["tool"].endswith("--to nvfp4-modelopt --attention bf16")


def test_draft_layers_stay_behind_and_cache_scales_come_along(sources, tmp_path):
    """PUBLIC_CASES 37 and 39: the model drops draft layers, and reads k_scale."""
    folder = shutil.copytree(sources / "ct", tmp_path / "in")
    scale = "model.layers.2.self_attn.attn.k_scale"

    def change(tensors):
        tensors["model.layers.4.self_attn.q_proj.weight_packed"] = torch.zeros(2, 2, dtype=torch.uint8)
        tensors[scale] = torch.tensor(0.5)

    edit_tensors(folder, change)
    convert(folder, tmp_path / "out", "nvfp4-modelopt")
    after = stored(tmp_path / "out")
    assert after[scale].item() == 0.5 and not any(".layers.4." in name for name in after)


def test_scales_in_another_shard_than_their_weight(sources, tmp_path):
    folder = shutil.copytree(sources / "ct, fp8 attention", tmp_path / "in")
    tensors = stored(folder)
    for shard in folder.glob("*.safetensors"):
        shard.unlink()
    parts = {name: name.rpartition(".")[2] for name in tensors}
    for part in set(parts.values()):
        save_file({n: t for n, t in tensors.items() if parts[n] == part}, folder / f"{part}.safetensors")
    edit_config(
        folder,
        lambda c: c.update(weight_map={n: f"{part}.safetensors" for n, part in parts.items()}),
        "model.safetensors.index.json",
    )
    before = values(folder)
    convert(folder, tmp_path / "out", "nvfp4-modelopt")
    after = values(tmp_path / "out")
    assert all(torch.equal(before[key], after[key]) for key in before)


# --- kills ----------------------------------------------------------------------------

KILLED = """
import os, random, shutil, signal, sys, time
from pathlib import Path
from vllm.checkpoint import convert as module
from vllm.checkpoint.convert import convert
source, out, kills, seed = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
gen = random.Random(seed)

def run(out):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            convert(source, out, "nvfp4-modelopt", "fp8-pb-wo")
            code = 0
        finally:
            os._exit(code)
    return child

start = time.monotonic()
assert os.waitpid(run(out.with_name("whole")), 0)[1] == 0
whole = time.monotonic() - start
points = []
while len(points) < kills:
    child = run(out)
    time.sleep(gen.uniform(0, 0.8) * whole)
    os.kill(child, signal.SIGKILL)
    if os.waitpid(child, 0)[1] == signal.SIGKILL:
        points.append(len(list(out.glob("*.safetensors"))))
    else:  # faster than the sleep: start over
        shutil.rmtree(out)
print("POINTS", points, "STATUS", os.waitpid(run(out), 0)[1])
"""


def test_a_killed_conversion_goes_on_and_ends_alike(tmp_path, shape):
    """Killed six times at random moments, wherever it then is; the result is byte for byte that of one run."""
    make_tiny(tmp_path / "in", format="mxfp4", shape=shape, seed=4, max_shard_bytes=250_000)
    seed = random.randrange(1 << 30)
    command = [sys.executable, "-c", KILLED, str(tmp_path / "in"), str(tmp_path / "out"), "6", str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    said = f"seed {seed}: {done.stdout[-2000:]}{done.stderr[-3000:]}"
    assert done.returncode == 0 and "STATUS 0" in done.stdout, said
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole"), said
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "whole")]
    assert configs[0]["checkpoint_provenance"]["loss"] == configs[1]["checkpoint_provenance"]["loss"], said


@pytest.mark.parametrize("moment", range(8))
def test_a_kill_between_any_two_renames(sources, tmp_path, moment):
    """Killed before the n-th rename: all places where one step is done and the next is not."""
    script = (
        "import os, signal, sys; from pathlib import Path; from vllm.checkpoint.convert import convert\n"
        "count, rename = 0, Path.rename\n"
        "def stop(self, to):\n"
        "    global count; count += 1\n"
        f"    os.kill(os.getpid(), signal.SIGKILL) if count == {moment + 1} else None\n"
        "    return rename(self, to)\n"
        "Path.rename = stop\n"
        "convert(Path(sys.argv[1]), Path(sys.argv[2]), 'nvfp4-ct')\n"
    )
    source, out = sources / "modelopt", tmp_path / "out"
    child = os.fork()
    if child == 0:
        try:
            sys.argv[1:] = [str(source), str(out)]
            exec(script, {})
        finally:
            os._exit(0)
    killed = os.waitpid(child, 0)[1] == signal.SIGKILL
    if killed and not (out / ".convert.done").exists():
        assert not (out / "config.json").exists() or (out / ".convert").exists()
        convert(source, out, "nvfp4-ct")
    convert(source, tmp_path / "whole", "nvfp4-ct")
    assert hashes(out) == hashes(tmp_path / "whole")
