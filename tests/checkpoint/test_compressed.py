# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors' formats: layout, bytes against the source and the other dialect."""

import json
import math

import pytest
import torch

from tests.models.kimi_k3 import reference
from vllm.checkpoint import compressed
from vllm.checkpoint.errors import CheckpointError
from vllm.checkpoint.preflight import check_checkpoint
from vllm.checkpoint.ranks import Deployment
from vllm.checkpoint.tensors import checkpoint_tensors
from vllm.checkpoint.tiny import ATTENTIONS, FORMATS, make_tiny

# Checkpoint -> (format, attention, layout of experts, layout of attention).
CASES = {
    "nvfp4": ("nvfp4-ct", None, "NVFP4", None),
    "nvfp4-fp8": ("nvfp4-ct", "fp8", "NVFP4", "FP8_BLOCK"),
    "mxfp4": ("mxfp4", None, "MXFP4", None),
    "mxfp4-fp8": ("mxfp4", "fp8", "MXFP4", "FP8_BLOCK"),
    "fp8-block": ("fp8-block-ct", None, None, "FP8_BLOCK"),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory, shape):
    folder = tmp_path_factory.mktemp("compressed")
    for name, (format, attention, _, _) in CASES.items():
        make_tiny(folder / name, format=format, attention=attention, shape=shape, seed=3)
    return folder


@pytest.fixture(params=CASES)
def case(request, paths):
    _, _, experts, attention = CASES[request.param]
    path = paths / request.param
    config = json.loads((path / "config.json").read_text())
    specs = checkpoint_tensors(config)
    layout = {n: compressed.algorithm(s.kind, experts, attention) for n, s in specs.items()}
    return path, config, specs, layout


def test_stored_tensors_per_layout(case):
    path, _, specs, layout = case
    expected = {}
    stored = reference.read_tensors(path)
    for name, spec in specs.items():
        out, columns = spec.shape[0], math.prod(spec.shape[1:])
        base = name.removesuffix("weight")
        if layout[name] in ("NVFP4", "MXFP4"):
            nv = layout[name] == "NVFP4"
            expected[base + "weight_packed"] = ("U8", (out, columns // 2))
            scale = ("F8_E4M3", (out, columns // 16)) if nv else ("U8", (out, columns // 32))
            expected[base + "weight_scale"] = scale
            if nv:
                expected[base + "weight_global_scale"] = expected[base + "input_global_scale"] = ("F32", (1,))
        elif layout[name] == "FP8_BLOCK":
            expected[name] = ("F8_E4M3", spec.shape)
            expected[base + "weight_scale"] = ("F32", (math.ceil(out / 128), math.ceil(columns / 128)))
        elif spec.zero_tail_axis is not None:
            expected[name] = (spec.dtype, stored[name].shape)
        else:
            expected[name] = (spec.dtype, spec.shape)
    assert {name: (entry.dtype, entry.shape) for name, entry in stored.items()} == expected


def test_only_what_the_layout_names_differs_from_bf16(case, bf16):
    path, _, _, layout = case
    got, source = reference.dequantise(path), reference.dequantise(bf16)
    assert got.keys() == source.keys()
    for name, values in source.items():
        assert torch.equal(got[name], values) == (layout[name] is None), name


def test_error_is_within_half_a_step(case, bf16):
    """Of the element grid; MXFP4 scales are powers of two, so its largest value may lie beyond 6."""
    path, _, _, layout = case
    got, source, stored = reference.dequantise(path), reference.dequantise(bf16), reference.read_tensors(path)
    for name, algo in layout.items():
        if algo is None:
            continue
        raw = stored[name.removesuffix("weight") + "weight_scale"].data
        rows, columns = source[name].shape
        if algo == "FP8_BLOCK":
            scale = raw.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
            bound = torch.maximum(source[name].abs() * 2**-4, scale * 2**-10)
        else:
            if algo == "NVFP4":
                scale = reference.E4M3[raw.long()].repeat_interleave(16, 1)
                scale = scale / stored[name.removesuffix("weight") + "weight_global_scale"].data
            else:
                scale = reference.E8M0[raw.long()].repeat_interleave(32, 1)
            x = (source[name] / scale).abs()
            half_step = torch.where(x <= 2, 0.25, torch.where(x <= 4, 0.5, 1.0))
            bound = torch.maximum(half_step, x - 6) * scale
            # Six and a half steps of e2m1 are rounded to 8 before the exponent is taken.
            assert x.max() <= (6 * (1 + 2**-4) if algo == "NVFP4" else 7)
        assert ((got[name] - source[name]).abs() <= bound * 1.0001).all(), name


def test_both_dialects_of_nvfp4_hold_the_same_experts(paths, nvfp4):
    """Same codes, same block scales; the tensor scale is the reciprocal, a power of two."""
    ours, theirs = reference.read_tensors(paths / "nvfp4"), reference.read_tensors(nvfp4)
    experts = [n for n in theirs if ".experts." in n and n.endswith(".weight")]
    assert experts
    for name in experts:
        base = name.removesuffix("weight")
        assert torch.equal(ours[base + "weight_packed"].data, theirs[name].data), name
        assert torch.equal(ours[base + "weight_scale"].data, theirs[base + "weight_scale"].data), name
        divisor = ours[base + "weight_global_scale"].data.item()
        assert divisor == 1 / theirs[base + "weight_scale_2"].data.item() and math.frexp(divisor)[0] == 0.5
        assert ours[base + "input_global_scale"].data.item() == 1.0
        pair = base.replace(".w1.", ".w3.")
        assert ours[pair + "weight_global_scale"].data.item() == divisor


def test_block_fp8_holds_what_the_modelopt_file_holds(paths, nvfp4):
    ours, theirs = reference.dequantise(paths / "nvfp4-fp8"), reference.dequantise(nvfp4)
    for name, values in theirs.items():
        assert torch.equal(ours[name], values), name


@pytest.mark.parametrize("ratio", [4.0, 1.25, 0.8])
def test_tensor_scales_of_w1_and_w3_may_differ(shape, tmp_path, bf16, ratio):
    """As divisors: the larger one belongs to the smaller scale."""
    make_tiny(tmp_path / "ratio", format="nvfp4-ct", shape=shape, seed=3, w3_scale_ratio=ratio)
    stored, got = reference.read_tensors(tmp_path / "ratio"), reference.dequantise(tmp_path / "ratio")
    source = reference.dequantise(bf16)
    base = "model.layers.1.block_sparse_moe.experts.1."
    w1, w3 = (stored[f"{base}{w}.weight_global_scale"].data.item() for w in ("w1", "w3"))
    assert w1 / w3 == pytest.approx(ratio, rel=1e-6)
    for name in (f"{base}w1.weight", f"{base}w3.weight"):
        assert (got[name] - source[name]).norm() < 0.13 * source[name].norm()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4"])
def test_experts_decode_with_the_library_that_wrote_them(paths, name):
    """Its decompressor, in BF16, agrees with the reference's decoder."""
    from compressed_tensors.compressors import BaseCompressor

    module = "model.layers.1.block_sparse_moe.experts.2.w1."
    stored = {n: e for n, e in reference.read_tensors(paths / name).items() if n.startswith(module)}
    tensors = {
        n.removeprefix(module): e.data.view(torch.float8_e4m3fn) if e.dtype == "F8_E4M3" else e.data
        for n, e in stored.items()
    }
    _, format = compressed._LAYOUTS[name.upper()]
    dense = BaseCompressor.get_value_from_registry(format).decompress(tensors, compressed._scheme(name.upper()))
    want = reference.dequantise(paths / name)[module + "weight"]
    torch.testing.assert_close(dense["weight"].float(), want, rtol=2**-8, atol=0)


def test_config_is_one_that_the_library_reads(case):
    from compressed_tensors.quantization import QuantizationConfig

    _, config, _, layout = case
    quant = config["quantization_config"]
    read = QuantizationConfig.model_validate(quant)
    assert quant["quant_method"] == "compressed-tensors" and quant["quantization_status"] == "compressed"
    kinds = {algo for algo in layout.values() if algo}
    assert len(read.config_groups) == len(kinds)
    if len(kinds) == 1:
        assert quant["format"] == compressed._LAYOUTS[next(iter(kinds))][1]
        assert read.config_groups["group_0"].targets == ["Linear"]
    else:
        assert quant["format"] == "mixed-precision"
        assert {group["format"] for group in quant["config_groups"].values()} == {
            compressed._LAYOUTS[kind][1] for kind in kinds
        }


def test_the_published_ignore_lists(paths):
    """NVFP4: shards by name, the rest by pattern; activations are quantised too (W4A4)."""
    quant = json.loads((paths / "nvfp4" / "config.json").read_text())["quantization_config"]
    assert {"model.layers.2.self_attn.q_a_proj", "model.layers.2.self_attn.kv_a_proj_with_mqa"} <= set(quant["ignore"])
    assert "model.layers.1.block_sparse_moe.shared_experts.gate_proj" in quant["ignore"]
    assert any(p.startswith("re:") for p in quant["ignore"])
    group = quant["config_groups"]["group_0"]
    assert group["input_activations"]["dynamic"] == "local" and group["weights"]["group_size"] == 16
    native = json.loads((paths / "mxfp4" / "config.json").read_text())["quantization_config"]
    assert native["config_groups"]["group_0"]["input_activations"] is None


@pytest.mark.parametrize("format, where", [("mxfp4", "text_config"), ("nvfp4-ct", None)])
def test_multimodal_files_keep_the_config_where_the_published_ones_do(format, where, shape, tmp_path):
    make_tiny(tmp_path / "mm", format=format, arch="multimodal", shape=shape, seed=3)
    config = json.loads((tmp_path / "mm" / "config.json").read_text())
    assert ("quantization_config" in config) == (where is None)
    quant = (config[where] if where else config)["quantization_config"]
    assert {"re:vision_tower.*", "re:mm_projector.*"} <= set(quant["ignore"])
    check_checkpoint(tmp_path / "mm")


def test_a_checkpoint_passes_its_own_check(case):
    check_checkpoint(case[0], Deployment(2))


def test_same_seed_same_bytes(paths, shape, tmp_path):
    make_tiny(tmp_path / "again", format="nvfp4-ct", attention="fp8", shape=shape, seed=3)
    for file in (paths / "nvfp4-fp8").iterdir():
        assert (tmp_path / "again" / file.name).read_bytes() == file.read_bytes(), file.name


def test_modelopt_experts_with_bf16_attention(nvfp4, bf16, shape, tmp_path):
    make_tiny(tmp_path / "mixed", format="nvfp4-modelopt", attention="bf16", shape=shape, seed=3)
    got, experts, rest = (reference.dequantise(path) for path in (tmp_path / "mixed", nvfp4, bf16))
    for name, values in got.items():
        assert torch.equal(values, (experts if ".experts." in name else rest)[name]), name
    layers = json.loads((tmp_path / "mixed" / "config.json").read_text())["quantization_config"]["quantized_layers"]
    assert layers and not any("self_attn" in name for name in layers)
    check_checkpoint(tmp_path / "mixed")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"format": "int3"}, "'int3' is unknown"),
        ({"attention": "int3"}, "'int3' is unknown"),
        ({"attention": "fp8"}, "bf16 with fp8 attention is the format fp8-block-ct"),
        ({"format": "fp8-block-ct", "attention": "bf16"}, "is the format bf16"),
        ({"format": "nvfp4-ct", "w3_scale_ratio": 0.0}, "must be > 0"),
    ],
)
def test_impossible_combinations_are_refused(options, message, shape, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        make_tiny(tmp_path / "out", shape=shape, **options)
    assert list(tmp_path.iterdir()) == []


def test_formats_and_attentions_are_the_documented_ones():
    assert FORMATS == ("bf16", "nvfp4-modelopt", "nvfp4-ct", "mxfp4", "fp8-block-ct")
    assert ATTENTIONS == ("fp8", "bf16")


def test_an_expert_width_that_cuts_a_group_is_refused(shape, tmp_path):
    import dataclasses

    with pytest.raises(CheckpointError, match="--expert-width is 48; MXFP4 needs a multiple of 32"):
        make_tiny(tmp_path / "out", format="mxfp4", shape=dataclasses.replace(shape, expert_width=48))


def test_the_quantised_model_is_close_to_its_source(paths, bf16, shape):
    tokens = [(11 * i) % shape.vocab for i in range(48)]
    exact = reference.load(bf16).logprobs(tokens)
    for name in CASES:
        got = reference.load(paths / name).logprobs(tokens)
        assert got.isfinite().all() and not torch.equal(exact, got)
        assert (exact - got).abs().median() < 0.5, name
