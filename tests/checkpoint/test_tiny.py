# SPDX-License-Identifier: Apache-2.0
"""Tiny checkpoints: layout on disk, determinism, care with folders, tokenizer."""

import argparse
import dataclasses
import json
import math
from pathlib import Path

import pytest
import torch

from tests.models.kimi_k3 import reference
from vllm.checkpoint import tiny
from vllm.checkpoint.errors import CheckpointError
from vllm.checkpoint.tensors import checkpoint_tensors
from vllm.checkpoint.tiny import TinyShape, make_tiny


def config_of(path: Path) -> dict:
    return json.loads((path / "config.json").read_text())


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


@pytest.mark.parametrize("which", ["bf16", "multimodal"])
def test_names_shapes_and_dtypes_are_the_descriptor_s(which, request):
    path = request.getfixturevalue(which)
    stored = reference.read_tensors(path)
    specs = checkpoint_tensors(config_of(path))
    assert list(stored) != [] and set(stored) == set(specs)
    for name, spec in specs.items():
        found = stored[name]
        assert found.dtype == spec.dtype, name
        if spec.zero_tail_axis is None:
            assert found.shape == spec.shape, name
        else:
            heads = spec.shape[0]
            assert found.shape[0] > heads
            assert not found.data[heads:].any() and found.data[:heads].all()


@pytest.mark.parametrize("which", ["bf16", "nvfp4", "multimodal"])
def test_index_lists_every_tensor_and_the_total_size(which, request):
    path = request.getfixturevalue(which)
    index = json.loads((path / "model.safetensors.index.json").read_text())
    stored = reference.read_tensors(path)
    assert len(set(index["weight_map"].values())) >= 2
    assert index["weight_map"] == {name: entry.file for name, entry in stored.items()}
    assert index["metadata"]["total_size"] == sum(e.data.nbytes for e in stored.values())
    shards = {file.name for file in path.glob("*.safetensors")}
    assert shards == set(index["weight_map"].values())
    assert shards == {f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)}


def test_no_tensor_is_constant(bf16):
    for name, values in reference.dequantise(bf16).items():
        assert values.isfinite().all(), name
        assert values.unique().numel() > 1, name


def test_same_seed_same_bytes_and_another_seed_other_bytes(bf16, shape, tmp_path):
    make_tiny(tmp_path / "again", shape=shape, seed=3)
    assert files_of(tmp_path / "again") == files_of(bf16)
    make_tiny(tmp_path / "other", shape=shape, seed=4)
    other = files_of(tmp_path / "other")
    assert {n for n, b in files_of(bf16).items() if other[n] != b} == {file.name for file in bf16.glob("*.safetensors")}


def test_both_classes_hold_the_same_language_model(bf16, multimodal):
    text, both = reference.load(bf16), reference.load(multimodal)
    tokens = list(range(0, 60, 3))
    assert torch.equal(text.logprobs(tokens), both.logprobs(tokens))


@pytest.mark.parametrize("arch", ["text", "multimodal"])
def test_given_weights_take_the_place_of_random_ones(bf16, shape, arch, tmp_path):
    weights = {name: -entry.data for name, entry in reference.read_tensors(bf16).items()}
    make_tiny(tmp_path / "m", shape=shape, seed=9, arch=arch, weights=weights)
    stored = reference.read_tensors(tmp_path / "m")
    prefix = "language_model." if arch == "multimodal" else ""
    assert all(torch.equal(stored[prefix + name].data, values) for name, values in weights.items())


@pytest.mark.parametrize("change", [None, torch.zeros(3, dtype=torch.bfloat16), torch.zeros(256)])
def test_given_weights_of_another_shape_or_dtype_are_named(bf16, shape, change, tmp_path):
    weights = {name: entry.data for name, entry in reference.read_tensors(bf16).items()}
    weights["model.norm.weight"] = change
    with pytest.raises(CheckpointError, match=r"model.norm.weight is .*, expected torch.bfloat16 \[256\]"):
        make_tiny(tmp_path / "m", shape=shape, weights=weights)
    assert not any(tmp_path.iterdir())


def test_more_shards_on_request(shape, bf16, tmp_path):
    summary = make_tiny(tmp_path / "many", shape=shape, seed=3, max_shard_bytes=1 << 20)
    assert summary.shards >= math.ceil(summary.bytes / (1 << 20)) > 2
    assert reference.dequantise(tmp_path / "many").keys() == reference.dequantise(bf16).keys()


def test_an_existing_checkpoint_is_only_replaced_with_force(shape, tmp_path):
    out = tmp_path / "out"
    make_tiny(out, shape=shape, seed=0)
    before = files_of(out)
    with pytest.raises(CheckpointError, match="exists already.*--force"):
        make_tiny(out, shape=shape, seed=1)
    assert files_of(out) == before
    make_tiny(out, shape=shape, seed=1, force=True)
    assert files_of(out) != before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_force_does_not_replace_what_is_no_checkpoint(shape, tmp_path):
    (tmp_path / "notes.txt").write_text("keep me")
    with pytest.raises(CheckpointError, match="no config.json"):
        make_tiny(tmp_path, shape=shape, force=True)
    assert (tmp_path / "notes.txt").read_text() == "keep me"


def test_a_link_is_followed(shape, tmp_path):
    make_tiny(tmp_path / "real", shape=shape, seed=0)
    (tmp_path / "link").symlink_to("real")
    before = files_of(tmp_path / "real")
    make_tiny(tmp_path / "link", shape=shape, seed=1, force=True)
    assert (tmp_path / "link").is_symlink() and files_of(tmp_path / "real") != before
    assert len(list(tmp_path.iterdir())) == 2


def test_an_empty_folder_may_be_filled(shape, tmp_path):
    make_tiny(tmp_path / "new" / "deep", shape=shape)
    (tmp_path / "empty").mkdir()
    make_tiny(tmp_path / "empty", shape=shape)
    assert (tmp_path / "empty" / "config.json").is_file()


def test_a_failed_replacement_keeps_the_old_checkpoint(shape, tmp_path, monkeypatch):
    make_tiny(tmp_path / "out", shape=shape, seed=0)
    before = files_of(tmp_path / "out")
    monkeypatch.setattr(tiny.tiny_tokenizer, "write_tokenizer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_tiny(tmp_path / "out", shape=shape, seed=1, force=True)
    assert files_of(tmp_path / "out") == before
    assert len(list(tmp_path.iterdir())) == 1


def test_a_failed_write_leaves_nothing_behind(shape, tmp_path, monkeypatch):
    monkeypatch.setattr(tiny.tiny_tokenizer, "write_tokenizer", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        make_tiny(tmp_path / "out", shape=shape)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "change, message",
    [
        ({"layers": "KK"}, "at least one KDA layer"),
        ({"layers": "KXM"}, "one letter per layer"),
        ({"top_k": 9}, "--top-k 9 exceeds --experts 4"),
        ({"expert_width": 40}, "--expert-width is 40; it must be a multiple of 16"),
        ({"vocab": 100}, "--vocab is 100"),
        ({"heads": 0}, "--heads is 0"),
    ],
)
def test_impossible_sizes_are_refused_before_anything_is_written(shape, tmp_path, change, message):
    with pytest.raises(CheckpointError, match=message):
        make_tiny(tmp_path / "out", shape=dataclasses.replace(shape, **change))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("layers, pattern", [("3", "KKM"), ("4", "KKKM"), ("9", "KKKMKKKMM"), ("kkmk", "KKMK")])
def test_a_number_of_layers_is_laid_out_as_in_kimi_k3(layers, pattern):
    assert tiny.layer_pattern(layers) == pattern


def test_a_log_is_stored_as_long_as_published():
    assert tiny.stored_a_log_length(96) == 128
    assert tiny.stored_a_log_length(4) == 8


def test_experts_are_used_unevenly_but_all(bf16, shape):
    model = reference.load(bf16)
    gen = torch.Generator().manual_seed(0)
    x = torch.randn(500, shape.hidden, generator=gen)
    for layer in (1, 2, 3):
        weights, ids = model.route(f"model.layers.{layer}.block_sparse_moe", x)
        counts = ids.flatten().bincount(minlength=shape.experts)
        assert counts.min() > 10 and counts.max() > 1.2 * counts.min()
        assert weights.std() > 0.05


# --- tokenizer and config as vLLM sees them ------------------------------------------


@pytest.fixture(scope="module")
def tokenizer(bf16):
    from vllm.tokenizers import get_tokenizer

    return get_tokenizer(str(bf16))


def test_tokenizer_covers_the_vocabulary_and_every_byte(tokenizer, bf16, shape):
    assert len(tokenizer) == shape.vocab == config_of(bf16)["vocab_size"]
    for text in ("the expert routes \n\t tokens", "ünïcødé 你好 🙂", '"quoted" <|not a marker|>'):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and max(ids) < shape.vocab
    assert len(tokenizer.encode("the")) == 1
    assert tokenizer.convert_ids_to_tokens(shape.vocab - 1) == "<|kimi_image_placeholder|>"


def test_special_ids_agree_with_the_config(tokenizer, bf16):
    config = config_of(bf16)
    assert tokenizer.eos_token_id == config["eos_token_id"]
    assert tokenizer.bos_token_id == config["bos_token_id"]
    assert tokenizer.pad_token_id == config["pad_token_id"]
    generation = json.loads((bf16 / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [
        tokenizer.eos_token_id,
        tokenizer.convert_tokens_to_ids("<|end_of_msg|>"),
    ]


def test_chat_template_speaks_k3_markers(tokenizer):
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
    ]

    def render(**kwargs):
        return tokenizer.apply_chat_template(chat, tokenize=False, **kwargs)

    turns = (
        '<|open|>message role="system"<|sep|>Be brief.<|close|>message<|sep|><|end_of_msg|>'
        '<|open|>message role="user"<|sep|>Hi<|close|>message<|sep|><|end_of_msg|>'
    )
    reply = '<|open|>message role="assistant"<|sep|>'
    assert render() == turns
    assert render(add_generation_prompt=True) == turns + reply + "<|open|>think<|sep|>"
    assert render(add_generation_prompt=True, thinking=False) == turns + reply + "<|open|>response<|sep|>"


@pytest.mark.parametrize("which", ["bf16", "nvfp4", "multimodal"])
def test_vllm_reads_the_config(which, request, shape):
    from vllm.config import ModelConfig

    path = request.getfixturevalue(which)
    config = ModelConfig(model=str(path), dtype="float32", trust_remote_code=which == "multimodal")
    text = config.hf_text_config
    assert config.is_hybrid and config.get_vocab_size() == shape.vocab
    assert [text.is_kda_layer(n) for n in range(4)] == [True, True, False, True]
    assert config.quantization == ("modelopt_mixed" if which == "nvfp4" else None)


def test_multimodal_files_satisfy_vllm_s_processor(multimodal, shape):
    from PIL import Image

    from vllm.config import ModelConfig
    from vllm.multimodal import MULTIMODAL_REGISTRY

    config = ModelConfig(model=str(multimodal), dtype="float32", trust_remote_code=True)
    info = MULTIMODAL_REGISTRY.create_processor(config).info
    image = Image.new("RGB", (150, 100), "red")
    inputs = info.hf_processor(text="<|kimi_image_placeholder|>", images=[image], return_tensors="pt")
    # 150x100 pads to 12 x 8 patches of 14 pixels, merged 2 x 2.
    assert inputs["pixel_values"].shape == (96, 3, 14, 14)
    assert inputs["grid_thws"].tolist() == [[1, 8, 12]]
    assert info.media_tokens_calculator({"type": "image", "image": image}) == 24
    assert info.media_token_id == config.hf_config.media_placeholder_token_id
    chat = info.get_tokenizer().apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=True)
    assert isinstance(chat, list) and all(isinstance(token, int) for token in chat)


# --- command --------------------------------------------------------------------------


def run_command(*argv: str) -> None:
    from vllm.entrypoints.cli.checkpoint import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser()
    subparsers: argparse._SubParsersAction = parser.add_subparsers(dest="subparser")
    (command,) = cmd_init()
    command.subparser_init(subparsers).set_defaults(dispatch_function=command.cmd)
    args = parser.parse_args(["checkpoint", *argv])
    command.validate(args)
    args.dispatch_function(args)


SMALL_FLAGS = "--hidden 64 --heads 2 --head-dim 32 --q-lora 32 --experts 4 --expert-width 32 --latent 32".split()


def test_command_writes_and_prints_a_table(tmp_path, capsys):
    out = tmp_path / "out"
    run_command("make-tiny", str(out), "--layers", "3", "--seed", "7", *SMALL_FLAGS)
    text = capsys.readouterr().out
    assert "KimiLinearForCausalLM, bf16, 2 shards, seed 7" in text
    assert [line.split()[0] for line in text.splitlines()[2:]][-1] == "total"
    assert config_of(out)["linear_attn_config"]["full_attn_layers"] == [3]


def test_command_prints_json(tmp_path, capsys):
    out = tmp_path / "out"
    run_command("make-tiny", str(out), "--json", *SMALL_FLAGS)
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    stored = reference.read_tensors(out)
    assert summary["tensors"] == len(stored)
    assert summary["bytes"] == sum(entry.data.nbytes for entry in stored.values())
    assert summary["bytes"] == sum(row["bytes"] for row in summary["families"].values())


def test_command_help_lists_every_option(capsys):
    with pytest.raises(SystemExit):
        run_command("make-tiny", "--help")
    text = capsys.readouterr().out
    for option in ("--format", "--arch", "--seed", "--force", "--json", "--heads", "--head-dim", "--layers"):
        assert option in text


def test_command_fails_with_one_line(tmp_path):
    (tmp_path / "notes.txt").touch()
    with pytest.raises(SystemExit) as error:
        run_command("make-tiny", str(tmp_path), *SMALL_FLAGS)
    assert "exists already" in str(error.value) and "\n" not in str(error.value)


def test_default_shape_is_the_documented_one():
    shape = TinyShape()
    assert (shape.hidden, shape.heads, shape.head_dim, shape.layers) == (512, 4, 128, "KKMK")
    assert (shape.q_lora, shape.kv_lora, shape.rope) == (256, 512, 64)
    assert (shape.expert_width, shape.latent, shape.top_k) == (128, 256, 2)
