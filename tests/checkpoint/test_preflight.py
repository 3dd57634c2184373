# SPDX-License-Identifier: Apache-2.0
"""Bad checkpoints and contradicting options are refused in one message."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vllm.checkpoint import strictness
from vllm.checkpoint.errors import CheckpointError
from vllm.checkpoint.model import read_model
from vllm.checkpoint.preflight import check_before_serving, check_checkpoint
from vllm.checkpoint.ranks import Deployment
from vllm.checkpoint.tiny import make_tiny

pytest.importorskip("modelopt", reason="writes a quantised checkpoint: pip install 'vllm[quantize]'")

KDA = "model.layers.0.self_attn"
EXPERTS = "model.layers.1.block_sparse_moe.experts"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("checkpoint") / "good"
    make_tiny(path, format="nvfp4-modelopt", seed=1)
    return path


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "bad")


def edit_config(folder, change, name="config.json"):
    config = json.loads((folder / name).read_text())
    change(config)
    (folder / name).write_text(json.dumps(config))


def edit_tensors(folder, change):
    """Rewrite all shards as one file after `change` of the name -> tensor dict."""
    tensors = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors.update(load_file(shard))
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def no_hf_quant_config(folder):
    (folder / "hf_quant_config.json").unlink()


def truncate(folder):
    shard = max(folder.glob("*.safetensors"))
    os.truncate(shard, shard.stat().st_size - 100)


def index_entry_gone(folder):
    edit_config(folder, lambda c: c["weight_map"].pop(f"{KDA}.b_proj.weight"), "model.safetensors.index.json")


def index_entry_of_nothing(folder):
    edit_config(
        folder,
        lambda c: c["weight_map"].update({"model.extra": "model-00001-of-00002.safetensors"}),
        "model.safetensors.index.json",
    )


def quantised(change):
    def apply(folder):
        no_hf_quant_config(folder)
        edit_config(folder, lambda c: change(c["quantization_config"]))

    return apply


def tensors(change):
    return lambda folder: edit_tensors(folder, change)


def reshape(name, shape):
    return tensors(lambda t: t.update({name: t[name].flatten()[: shape[0] * shape[1]].reshape(shape).contiguous()}))


CASES = {
    "missing shard": (lambda f: min(f.glob("*.safetensors")).unlink(), "00001-of-00002.* Fetch them"),
    "index entry gone": (index_entry_gone, f"does not list 1 tensors.*{KDA}.b_proj.weight"),
    "index entry of nothing": (index_entry_of_nothing, "says that model.extra.*no shard holds it"),
    "truncated": (truncate, r"has \d+ bytes, its header describes \d+.*truncated"),
    "no header": (
        lambda f: max(f.glob("*.safetensors")).write_bytes(b"\xff" * 64),
        "announce a header of .* truncated or no safetensors",
    ),
    "wrong shape": (
        reshape(f"{KDA}.b_proj.weight", (2, 512)),
        rf"{KDA}.b_proj.weight in model.safetensors: shape \[2, 512\], expected \[4, 512\]",
    ),
    "wrong dtype": (
        tensors(lambda t: t.update({f"{KDA}.q_proj.weight": t[f"{KDA}.q_proj.weight"].float().bfloat16()})),
        f"{KDA}.q_proj.weight in .*: dtype BF16, expected F8_E4M3 .the config says FP8_PB_WO",
    ),
    "quantised, says the file alone": (
        quantised(lambda q: [q["quantized_layers"].pop(k) for k in list(q["quantized_layers"]) if "layers.1." in k]),
        f"{EXPERTS}.0.w1.weight in .*: dtype U8, expected BF16 .* .the config says not quantised",
    ),
    "missing block scale": (
        tensors(lambda t: t.pop(f"{EXPERTS}.3.w2.weight_scale")),
        rf"{EXPERTS}.3.w2.weight_scale: missing; expected F8_E4M3 \[256, 8\]",
    ),
    "missing tensor scale": (
        tensors(lambda t: t.pop(f"{EXPERTS}.2.w1.weight_scale_2")),
        f"{EXPERTS}.2.w1.weight_scale_2: missing",
    ),
    "one input scale missing": (
        tensors(lambda t: t.pop(f"{EXPERTS}.2.w2.input_scale")),
        f"{EXPERTS}.2.w2.input_scale: missing",
    ),
    "wrong block count": (
        reshape(f"{KDA}.q_proj.weight_scale", (2, 4)),
        rf"{KDA}.q_proj.weight_scale in .*: shape \[2, 4\], expected \[4, 1, 4, 1\]",
    ),
    "a tensor too many": (
        tensors(lambda t: t.update({f"{KDA}.q_proj.zero_point": t[f"{KDA}.A_log"].clone()})),
        f"{KDA}.q_proj.zero_point in .*: the model has no such tensor",
    ),
    "unknown algorithm": (
        quantised(lambda q: q["quantized_layers"][f"{KDA}.o_proj"].update(quant_algo="FP9")),
        "layers.0.self_attn.o_proj: quant_algo 'FP9' is not supported.*supported: .*FP8_PB_WO",
    ),
    "unknown overall algorithm": (
        quantised(lambda q: q.update(quant_algo="INT3")),
        "quant_algo 'INT3' is not supported",
    ),
    "layers that name nothing": (
        quantised(lambda q: q["quantized_layers"].update({"decoder.7.qkv": {"quant_algo": "FP8_PB_WO"}})),
        "quantized_layers names decoder.7.qkv, which this model does not have",
    ),
    "configs that disagree": (
        lambda f: edit_config(f, lambda c: c["quantization_config"]["quantized_layers"].popitem()),
        "config.json and hf_quant_config.json disagree about quantized_layers",
    ),
    "no linear_attn_config": (
        lambda f: edit_config(f, lambda c: c.pop("linear_attn_config")),
        "'linear_attn_config' is missing",
    ),
    "a layer of no kind": (
        lambda f: edit_config(f, lambda c: c["linear_attn_config"]["kda_layers"].remove(1)),
        r"layer 1 .*exactly one of",
    ),
    "config is no JSON": (lambda f: (f / "config.json").write_text("{"), "is no JSON"),
}


def test_a_good_checkpoint_passes(good):
    for tp in (1, 2, 4):
        check_checkpoint(good, Deployment(tp))
    check_checkpoint(good, quantization="modelopt_mixed")


@pytest.mark.parametrize("case", CASES)
def test_bad_files_are_refused(folder, case):
    spoil, message = CASES[case]
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(folder)
    assert re.search(message, str(caught.value), re.S), str(caught.value)
    assert str(folder) in str(caught.value)


def test_who_asks_for_inexact_files_gets_a_warning(folder, monkeypatch):
    spoil, message = CASES["one input scale missing"]
    spoil(folder)
    said = []
    monkeypatch.setenv("VLLM_ALLOW_INEXACT_CHECKPOINT", "1")
    monkeypatch.setattr(strictness.logger, "warning", lambda text, *args: said.append(text % args))
    assert check_checkpoint(folder).errors
    assert len(said) == 1 and re.search(message, said[0])


def test_tensor_parallel_size_must_divide_the_heads(good):
    with pytest.raises(CheckpointError, match=r"size 3 does not divide num_attention_heads = 4.*\[1, 2, 4\]"):
        check_checkpoint(good, Deployment(3))


@pytest.mark.parametrize("asked", ["fp8", "compressed-tensors", "mxfp4"])
def test_quantization_option_must_agree_with_the_file(good, asked):
    with pytest.raises(CheckpointError, match=f"--quantization {asked} contradicts .*'modelopt_mixed'"):
        check_checkpoint(good, quantization=asked)


def test_both_scale_dialects_pass(folder):
    """The rank-2 `weight_scale_inv` of other public files (case 1)."""

    def rename(t):
        for name in [n for n in t if n.endswith("self_attn.o_proj.weight_scale")]:
            scale = t.pop(name)
            t[name + "_inv"] = scale.reshape(scale.shape[0], scale.shape[2]).contiguous()

    edit_tensors(folder, rename)
    check_checkpoint(folder)


def test_a_log_may_be_longer_than_the_heads(good):
    with safe_open(good / "model-00001-of-00002.safetensors", "pt") as file:
        assert file.get_slice(f"{KDA}.A_log").get_shape() == [8]


def test_what_is_not_ours_passes_unread(tmp_path):
    args = SimpleNamespace(load_format="auto", quantization="fp8", checkpoint_preflight=True)
    args.tensor_parallel_size, args.pipeline_parallel_size, args.enable_expert_parallel = 3, 1, False
    check_before_serving(SimpleNamespace(**vars(args), model="some-org/some-model"))
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    check_before_serving(SimpleNamespace(**vars(args), model=str(tmp_path)))


def engine_args(folder, *options):
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    return EngineArgs.from_cli_args(parser.parse_args(["--model", str(folder), *options]))


def test_one_flag_turns_the_check_off(folder):
    CASES["missing block scale"][0](folder)
    with pytest.raises(CheckpointError, match="w2.weight_scale: missing"):
        check_before_serving(engine_args(folder))
    check_before_serving(engine_args(folder, "--no-checkpoint-preflight"))


def test_the_check_knows_how_the_engine_will_run(good):
    """Pipeline, tensor and expert parallel sizes are those of the engine's arguments."""
    for options, message in (
        (("-tp", "3"), "size 3 does not divide num_attention_heads"),
        (("-pp", "5"), "pipeline parallel size 5 exceeds"),
    ):
        with pytest.raises(CheckpointError, match=message):
            check_before_serving(engine_args(good, *options))
    check_before_serving(engine_args(good, "-tp", "2", "--enable-expert-parallel"))


def test_a_good_file_gets_one_line(good, monkeypatch):
    lines = []
    monkeypatch.setattr("vllm.checkpoint.preflight.logger.info", lambda text, *values: lines.append(text % values))
    check_before_serving(engine_args(good, "-tp", "2"))
    assert len(lines) == 1
    assert re.search(
        r"424 tensors in 2 files fit the config; weights by format: NVFP4 72, BF16 \d+, FP8_PB_WO 30, F32 \d+; "
        r"0\.01 GiB per rank; 2 kinds of block-scaled layers are padded\. Checked in \d\.\d s",
        lines[0],
    ), lines


def test_fused_modules_are_those_of_the_config(good, tmp_path):
    """Without a full-rank gate no g_proj runs in KDA's input projection, so the list lacks none."""
    config = json.loads((good / "config.json").read_text())
    config["linear_attn_config"]["use_full_rank_gate"] = False
    layers = config["quantization_config"]["quantized_layers"]
    for name in [n for n in layers if n.endswith("g_proj") and not n.startswith("model.layers.2.")]:
        del layers[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = read_model(tmp_path)
    assert model.refused == () and model.algos[f"{KDA}.b_proj.weight"] == "FP8_PB_WO"
    del layers[f"{KDA}.b_proj"], layers[f"{KDA}.in_proj_qkvgfab"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert "in_proj_qkvgfab: quantized_layers lists" in read_model(tmp_path).refused[0]


# What `vllm serve` is started with: how the file is spoilt, options, and what must be said.
SERVED = {
    "missing block scale": ("missing block scale", (), "w2.weight_scale: missing"),
    "contradicting option": (None, ("--quantization", "fp8"), "contradicts the checkpoint"),
    "heads not divided": (None, ("--tensor-parallel-size", "3"), "does not divide num_attention_heads"),
    "length of its own": (None, ("--max-model-len", "100000"), "max_model_len"),
}


@pytest.fixture(scope="module")
def starts(good, tmp_path_factory):
    """All starts at once, since each spends 20 s on importing: name -> (folder, process)."""
    found = {}
    for name, (case, options, _) in SERVED.items():
        folder = shutil.copytree(good, tmp_path_factory.mktemp("served") / "bad")
        if case:
            CASES[case][0](folder)
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(folder), *options]
        env = dict(os.environ, HF_HUB_OFFLINE="1")
        pipe = subprocess.PIPE
        found[name] = folder, subprocess.Popen(command, env=env, stdout=pipe, stderr=pipe, text=True, process_group=0)
    yield found
    for _, process in found.values():
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("name", SERVED)
def test_serve_exits_with_one_message_and_leaves_nothing(starts, name):
    folder, process = starts[name]
    stdout, stderr = process.communicate(timeout=300)
    assert process.returncode == 2, stderr[-2000:]
    assert SERVED[name][2] in stderr
    assert "Traceback" not in stdout + stderr
    left = subprocess.run(["pgrep", "-f", str(folder)], capture_output=True, text=True)
    assert left.stdout == ""
