# SPDX-License-Identifier: Apache-2.0
"""The mixed format: layout as published, bytes decodable, errors within the format."""

import fnmatch
import json
import math
import sys

import pytest
import torch

from tests.models.kimi_k3 import reference
from vllm.checkpoint import modelopt
from vllm.checkpoint.errors import CheckpointError
from vllm.checkpoint.tensors import checkpoint_tensors
from vllm.checkpoint.tiny import make_tiny


@pytest.fixture(scope="module")
def stored(nvfp4):
    return reference.read_tensors(nvfp4)


@pytest.fixture(scope="module")
def config(nvfp4):
    return json.loads((nvfp4 / "config.json").read_text())


@pytest.fixture(scope="module")
def specs(config):
    return checkpoint_tensors(config)


def of(specs, algo):
    return {name: spec for name, spec in specs.items() if modelopt.algorithm(spec.kind) == algo}


def test_every_linear_of_the_published_lists_is_quantised(specs):
    fp8 = {spec.kind for spec in of(specs, "FP8_PB_WO").values()}
    assert fp8 == {f"kda.{m}_proj" for m in ("q", "k", "v", "g", "b", "f_a", "f_b", "o")} | {
        f"mla.{m}" for m in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "g_proj", "o_proj")
    }
    assert {spec.kind for spec in of(specs, "NVFP4").values()} == {"expert.w1", "expert.w2", "expert.w3"}


def test_stored_tensors_per_algorithm(stored, specs):
    expected = {}
    for name, spec in specs.items():
        algo, base = modelopt.algorithm(spec.kind), name.removesuffix("weight")
        out, columns = spec.shape[0], math.prod(spec.shape[1:])
        if algo == "NVFP4":
            expected[name] = ("U8", (out, columns // 2))
            expected[base + "weight_scale"] = ("F8_E4M3", (out, columns // 16))
            expected[base + "weight_scale_2"] = expected[base + "input_scale"] = ("F32", ())
        elif algo == "FP8_PB_WO":
            blocks = (math.ceil(out / 128), 1, math.ceil(columns / 128), 1)
            expected[name] = ("F8_E4M3", spec.shape)
            expected[base + "weight_scale"] = ("F32", blocks)
        elif spec.zero_tail_axis is not None:
            expected[name] = (spec.dtype, stored[name].shape)
        else:
            expected[name] = (spec.dtype, spec.shape)
    assert {name: (entry.dtype, entry.shape) for name, entry in stored.items()} == expected


@pytest.mark.parametrize(
    "module, blocks",
    [
        ("0.self_attn.b_proj", (1, 1, 2, 1)),  # 2 rows
        ("0.self_attn.f_b_proj", (1, 1, 1, 1)),  # 48 columns
        ("2.self_attn.kv_a_proj_with_mqa", (5, 1, 2, 1)),  # 576 rows
        ("2.self_attn.q_a_proj", (2, 1, 2, 1)),  # 192 rows
    ],
)
def test_partial_blocks_have_a_scale(stored, module, blocks):
    assert stored[f"model.layers.{module}.weight_scale"].shape == blocks


def test_low_nibble_is_the_even_column_by_independent_arithmetic(stored, bf16):
    """Decode one row byte by byte and compare its signs and sizes with the source."""
    source = reference.dequantise(bf16)
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    row = source[name][5].tolist()
    scale_2 = stored[name + "_scale_2"].data.item()
    for column, want in enumerate(row):
        byte = int(stored[name].data[5, column // 2])
        code = byte >> 4 if column % 2 else byte & 0xF
        bits = int(stored[name + "_scale"].data[5, column // 16])
        exponent, mantissa = bits >> 3, bits & 7
        block = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
        got = values[code & 7] * (-1 if code & 8 else 1) * block * scale_2
        # Steps of e2m1 are at most 2, so rounding is off by one block scale at most.
        assert abs(got - want) <= block * scale_2 + 1e-9, column


def test_nvfp4_error_is_within_half_a_step(nvfp4, bf16, stored, specs):
    got, source = reference.dequantise(nvfp4), reference.dequantise(bf16)
    for name in of(specs, "NVFP4"):
        scale = reference.E4M3[stored[name + "_scale"].data.long()].repeat_interleave(16, 1)
        scale = scale * stored[name + "_scale_2"].data
        x = (source[name] / scale).abs()
        # Half steps 1/4, 1/2, 1 up to 2, 4, 6. The block scale is itself rounded to
        # four significant bits, so that a block's largest value may lie beyond 6.
        half_step = torch.where(x <= 2, 0.25, torch.where(x <= 4, 0.5, 1.0))
        assert ((got[name] - source[name]).abs() <= half_step * scale * 1.0001).all(), name
        assert x.max() <= 6 * (1 + 2**-4)


def test_fp8_error_is_within_half_a_step(nvfp4, bf16, stored, specs):
    got, source = reference.dequantise(nvfp4), reference.dequantise(bf16)
    for name, spec in of(specs, "FP8_PB_WO").items():
        rows, columns = spec.shape
        scale = stored[name + "_scale"].data[:, 0, :, 0]
        scale = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        bound = torch.maximum(source[name].abs() * 2**-4, scale * 2**-10) * 1.0001
        assert ((got[name] - source[name]).abs() <= bound).all(), name


def test_scales_are_far_from_one_and_differ(stored, specs):
    tensor_scales = set()
    for name, spec in specs.items():
        algo = modelopt.algorithm(spec.kind)
        if algo == "NVFP4":
            block = reference.E4M3[stored[name + "_scale"].data.long()]
            assert block.unique().numel() > 16 and block.min() > 0, name
            tensor_scales.add(stored[name + "_scale_2"].data.item())
        elif algo == "FP8_PB_WO":
            scale = stored[name + "_scale"].data
            assert (scale > 0).all() and (scale < 0.1).all()
            assert scale.unique().numel() == scale.numel(), name
    assert len(tensor_scales) >= 3


def test_tensor_scales_are_powers_of_two_shared_by_w1_and_w3(stored, specs):
    for name in of(specs, "NVFP4"):
        scale = stored[name + "_scale_2"].data.item()
        assert math.frexp(scale)[0] == 0.5, name
        if ".w1." in name:
            assert scale == stored[name.replace(".w1.", ".w3.") + "_scale_2"].data.item()
        assert stored[name.removesuffix("weight") + "input_scale"].data.item() == 1.0


@pytest.mark.parametrize("amax, scale", [(2688.0, 1.0), (2688.1, 2.0), (1344.0, 0.5), (1.0, 2.0**-11)])
def test_power_of_two_scale_covers_amax(amax, scale):
    assert modelopt.power_of_two_scale(amax) == scale
    assert amax / scale <= 448 * 6


@pytest.mark.parametrize("amax", [0.0, math.inf, math.nan])
def test_power_of_two_scale_of_nothing_is_refused(amax):
    with pytest.raises(ValueError, match="no tensor scale"):
        modelopt.power_of_two_scale(amax)


@pytest.mark.parametrize("ratio", [4.0, 1.25, 0.8])
def test_tensor_scales_of_w1_and_w3_may_differ(nvfp4, bf16, shape, tmp_path, ratio):
    out = tmp_path / "ratio"
    make_tiny(out, format="nvfp4-modelopt", shape=shape, seed=3, w3_scale_ratio=ratio)
    stored, got = reference.read_tensors(out), reference.dequantise(out)
    source = reference.dequantise(bf16)
    name = "model.layers.1.block_sparse_moe.experts.1.w1.weight"
    other = name.replace(".w1.", ".w3.")
    scales = [stored[n + "_scale_2"].data.item() for n in (name, other)]
    assert scales[1] / scales[0] == pytest.approx(ratio, rel=1e-6)
    for n in (name, other):
        assert (got[n] - source[n]).norm() < 0.13 * source[n].norm()


def test_what_is_not_quantised_equals_the_bf16_checkpoint(nvfp4, bf16, specs):
    got, source = reference.dequantise(nvfp4), reference.dequantise(bf16)
    assert got.keys() == source.keys()
    for name in of(specs, None):
        assert torch.equal(got[name], source[name]), name


def test_config_has_the_published_layout(config, nvfp4, shape):
    quant = config["quantization_config"]
    assert list(quant) == [
        "quant_method",
        "quant_algo",
        "kv_cache_quant_algo",
        "group_size",
        "exclude_modules",
        "quantized_layers",
    ]
    assert (quant["quant_method"], quant["quant_algo"]) == ("modelopt_mixed", "MIXED_PRECISION")
    assert quant["kv_cache_quant_algo"] is None and quant["group_size"] == 16
    layers = quant["quantized_layers"]
    for root in ("language_model.model.", "model.", ""):
        for spelling in ("block_sparse_moe", "mlp"):
            assert layers[f"{root}layers.1.{spelling}.experts"] == {"quant_algo": "NVFP4", "group_size": 16}
    for module in ("0.self_attn.in_proj_qkvgfab", "0.self_attn.b_proj", "2.self_attn.fused_qkv_a_proj"):
        assert layers[f"model.layers.{module}"] == {"quant_algo": "FP8_PB_WO"}
    assert not any("layers.0.mlp.experts" in key for key in layers)
    separate = json.loads((nvfp4 / "hf_quant_config.json").read_text())["quantization"]
    assert separate == {key: value for key, value in quant.items() if key != "quant_method"}


def test_exclusions_cover_exactly_what_is_not_listed(config, specs):
    quant = config["quantization_config"]
    for name, spec in specs.items():
        module = name.removesuffix(".weight")
        excluded = any(fnmatch.fnmatchcase(module, p) for p in quant["exclude_modules"])
        listed = module in quant["quantized_layers"] or ".experts." in module
        if name.endswith(".weight"):
            assert excluded != listed, name
        assert listed == (modelopt.algorithm(spec.kind) is not None)
    assert any(p.startswith("*") for p in quant["exclude_modules"])
    assert any(p.endswith("*") for p in quant["exclude_modules"])


def test_multimodal_keys_and_exclusions(multimodal):
    specs = checkpoint_tensors(json.loads((multimodal / "config.json").read_text()))
    quant = modelopt.quantization_config(specs)
    layers = quant["quantized_layers"]
    assert "language_model.model.layers.1.block_sparse_moe.experts" in layers
    assert "language_model.model.layers.0.self_attn.in_proj_qkvgfab" in layers
    assert not any(key.startswith(("vision_tower", "mm_projector")) for key in layers)
    assert {"vision_tower*", "mm_projector*"} <= set(quant["exclude_modules"])


def test_same_seed_same_bytes(nvfp4, shape, tmp_path):
    make_tiny(tmp_path / "again", format="nvfp4-modelopt", shape=shape, seed=3)
    for file in nvfp4.iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


def test_the_quantised_model_is_close_to_its_source(nvfp4, bf16, shape):
    tokens = [(11 * i) % shape.vocab for i in range(48)]
    exact = reference.load(bf16).logprobs(tokens)
    quantised = reference.load(nvfp4).logprobs(tokens)
    assert quantised.isfinite().all() and not torch.equal(exact, quantised)
    # Ten per cent error on experts and three on attention move log-probs by about
    # 0.2; a permuted scale or nibble moves them by their spread, about 2.
    assert (exact - quantised).abs().median() < 0.4
    agree = (exact.argmax(-1) == quantised.argmax(-1)).float().mean()
    assert agree > 0.5


def test_a_dequantised_copy_is_the_same_model(nvfp4, tmp_path, shape):
    tokens = list(range(0, 90, 7))
    reference.write_dequantised(nvfp4, tmp_path / "plain")
    plain = reference.read_tensors(tmp_path / "plain")
    assert {entry.dtype for entry in plain.values()} == {"F32"}
    assert not (tmp_path / "plain" / "hf_quant_config.json").exists()
    want = reference.load(nvfp4).logprobs(tokens)
    assert torch.equal(reference.load(tmp_path / "plain").logprobs(tokens), want)


def test_dequantised_experts_are_exact_in_bf16(nvfp4, specs):
    for name, values in reference.dequantise(nvfp4).items():
        if ".experts." in name:
            assert torch.equal(values.bfloat16().float(), values), name


def test_without_modelopt_the_error_says_what_to_install(shape, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "modelopt", None)
    for name in [n for n in sys.modules if n.startswith("modelopt.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(CheckpointError, match=r"pip install 'vllm\[quantize\]'"):
        make_tiny(tmp_path / "out", format="nvfp4-modelopt", shape=shape)
    assert list(tmp_path.iterdir()) == []
