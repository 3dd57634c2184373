# SPDX-License-Identifier: Apache-2.0
"""Bad compressed-tensors checkpoints are refused before weights are allocated."""

import re
import shutil

import pytest
import torch

from tests.checkpoint.test_preflight import EXPERTS, KDA, edit_config, edit_tensors
from vllm.checkpoint.errors import CheckpointError
from vllm.checkpoint.preflight import check_checkpoint
from vllm.checkpoint.ranks import Deployment
from vllm.checkpoint.tiny import make_tiny

FORMATS = {
    "nvfp4-ct": ("nvfp4-ct", None),
    "nvfp4-ct-fp8": ("nvfp4-ct", "fp8"),
    "mxfp4": ("mxfp4", None),
    "fp8-block-ct": ("fp8-block-ct", None),
}
MLA = "model.layers.2.self_attn"


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    folder = tmp_path_factory.mktemp("good")
    for name, (format, attention) in FORMATS.items():
        make_tiny(folder / name, format=format, attention=attention, seed=1)
    return folder


def quant(change):
    return lambda folder: edit_config(folder, lambda c: change(c["quantization_config"]))


def unignore(name):
    return quant(lambda q: q["ignore"].remove(name))


def ignore(*names):
    return quant(lambda q: q["ignore"].extend(names))


def tensors(change):
    return lambda folder: edit_tensors(folder, change)


def drop(name):
    return tensors(lambda t: t.pop(name))


def cast(name, dtype):
    return tensors(lambda t: t.update({name: t[name].to(dtype)}))


def reshape(name, *shape):
    return tensors(lambda t: t.update({name: t[name].flatten()[: shape[0] * shape[1]].reshape(shape).clone()}))


W1_SCALE = "w1.weight_scale"

CASES = {
    "one of two ignored": (
        "nvfp4-ct",
        unignore(f"{MLA}.q_a_proj"),
        "fused_qkv_a_proj: .*q_a_proj follows 'Linear', kv_a_proj_with_mqa is not quantised",
    ),
    "one of two shared halves ignored": (
        "nvfp4-ct",
        unignore("model.layers.1.block_sparse_moe.shared_experts.up_proj"),
        "shared_experts.gate_up_proj: .*gate_proj is not quantised, up_proj follows",
    ),
    "quantised, says the config alone": (
        "nvfp4-ct",
        unignore(f"{MLA}.o_proj"),
        rf"{MLA}.o_proj.weight_packed: missing; expected U8 .*the config says compressed-tensors NVFP4",
    ),
    "quantised, says the file alone": (
        "nvfp4-ct",
        ignore(r"re:.*layers\.1\.block_sparse_moe\.experts\..*"),
        f"{EXPERTS}.0.w1.weight: missing; expected BF16.*the config says not quantised",
    ),
    "some experts ignored": (
        "mxfp4",
        ignore(r"re:.*layers\.1\..*experts\.\d+\.w2"),
        "mxfp4-pack-quantized leaves out .*experts.0.w2.weight.*all routed experts quantised",
    ),
    "native file quantises attention": (
        "mxfp4",
        unignore(f"{MLA}.o_proj"),
        f"mxfp4-pack-quantized quantises {MLA}.o_proj.weight.*mixed-precision",
    ),
    "missing block scale": (
        "nvfp4-ct",
        drop(f"{EXPERTS}.3.w2.weight_scale"),
        rf"{EXPERTS}.3.w2.weight_scale: missing; expected F8_E4M3 \[256, 8\]",
    ),
    "missing tensor scale": (
        "nvfp4-ct",
        drop(f"{EXPERTS}.2.w1.weight_global_scale"),
        rf"{EXPERTS}.2.w1.weight_global_scale: missing; expected F32 \[1\]",
    ),
    "one input scale missing": (
        "nvfp4-ct",
        drop(f"{EXPERTS}.2.w2.input_global_scale"),
        f"{EXPERTS}.2.w2.input_global_scale: missing",
    ),
    "block scale as bytes": (
        "nvfp4-ct",
        tensors(lambda t: t.update({f"{EXPERTS}.0.{n}": t[f"{EXPERTS}.0.{n}"].view(torch.uint8) for n in [W1_SCALE]})),
        f"{EXPERTS}.0.w1.weight_scale in .*: dtype U8, expected F8_E4M3",
    ),
    "MXFP4 scale as numbers": (
        "mxfp4",
        cast(f"{EXPERTS}.0.w1.weight_scale", torch.float32),
        f"{EXPERTS}.0.w1.weight_scale in .*: dtype F32, expected U8 or F8_E8M0",
    ),
    "MXFP4 groups of 16": (
        "mxfp4",
        reshape(f"{EXPERTS}.0.w1.weight_scale", 64, 16),
        rf"{EXPERTS}.0.w1.weight_scale in .*: shape \[64, 16\], expected \[128, 8\]",
    ),
    "NVFP4 scales in an MXFP4 file": (
        "mxfp4",
        tensors(lambda t: t.update({f"{EXPERTS}.0.w1.weight_global_scale": torch.ones(1)})),
        f"{EXPERTS}.0.w1.weight_global_scale in .*: the model has no such tensor",
    ),
    "wrong block count": (
        "fp8-block-ct",
        reshape(f"{KDA}.q_proj.weight_scale", 2, 4),
        rf"{KDA}.q_proj.weight_scale in .*: shape \[2, 4\], expected \[4, 4\]",
    ),
    "BF16 where FP8 is promised": (
        "fp8-block-ct",
        tensors(lambda t: t.update({f"{KDA}.b_proj.weight": t[f"{KDA}.b_proj.weight"].bfloat16()})),
        f"{KDA}.b_proj.weight in .*: dtype BF16, expected F8_E4M3 .the config says compressed-tensors FP8_BLOCK",
    ),
    "one shard of six left out of a group": (
        "nvfp4-ct-fp8",
        ignore(f"{KDA}.b_proj"),
        f"{KDA}.in_proj_qkvgfab: .*b_proj is not quantised",
    ),
}


@pytest.mark.parametrize("name", FORMATS)
def test_a_good_checkpoint_passes(good, name):
    for tp in (1, 2, 4):
        check_checkpoint(good / name, Deployment(tp))
    check_checkpoint(good / name, quantization="compressed-tensors")


@pytest.mark.parametrize("case", CASES)
def test_bad_files_are_refused(good, tmp_path, case):
    name, spoil, message = CASES[case]
    folder = shutil.copytree(good / name, tmp_path / "bad")
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        check_checkpoint(folder)
    assert re.search(message, str(caught.value), re.S), str(caught.value)
    assert str(folder) in str(caught.value)


def test_a_weight_only_file_has_no_input_scales(good, tmp_path):
    folder = shutil.copytree(good / "nvfp4-ct", tmp_path / "copy")
    edit_tensors(folder, lambda t: [t.pop(n) for n in list(t) if n.endswith("input_global_scale")])
    check_checkpoint(folder)


def test_scales_in_the_model_s_dtype_pass(good, tmp_path):
    folder = shutil.copytree(good / "fp8-block-ct", tmp_path / "copy")
    edit_tensors(folder, lambda t: t.update({n: v.bfloat16() for n, v in t.items() if n.endswith("weight_scale")}))
    check_checkpoint(folder)


def test_an_unknown_scheme_is_left_to_the_engine(good, tmp_path):
    folder = shutil.copytree(good / "fp8-block-ct", tmp_path / "copy")
    quant(lambda q: q["config_groups"]["group_0"]["weights"].update(num_bits=8, type="int", strategy="channel"))(folder)
    check_checkpoint(folder)


@pytest.mark.parametrize("asked", ["mxfp4", "modelopt_mixed", "fp8"])
def test_quantization_option_must_agree_with_the_file(good, asked):
    with pytest.raises(CheckpointError, match=f"--quantization {asked} contradicts"):
        check_checkpoint(good / "nvfp4-ct", quantization=asked)


def test_the_native_file_may_be_called_by_the_engine_s_name(good):
    check_checkpoint(good / "mxfp4", quantization="mxfp4")
