# SPDX-License-Identifier: Apache-2.0
"""Shards of a fused NVFP4 linear, for kernels that take one tensor scale.

The kernels of GPUs are replaced by one that keeps the weight as it is handed to it; decoding is the test's own.
"""

import importlib

import pytest
import torch

from vllm.model_executor.kernels.linear import EmulationNvFp4LinearKernel, NvFp4LinearLayerConfig
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.platforms import current_platform

pytestmark = [
    pytest.mark.skipif(not current_platform.is_cpu(), reason="stands in for a GPU"),
    pytest.mark.usefixtures("one_rank"),
]

ROWS, COLUMNS = (48, 32), 64
LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
KINDS = ["modelopt", "modelopt, weight-only", "compressed-tensors", "compressed-tensors, weight-only"]
SCHEME = "compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4"


class Kept:
    """A kernel that multiplies by nothing."""

    quantizes_input, scales_shards_apart = True, False

    def process_weights_after_loading(self, layer):
        pass

    def input_quant_key(self):
        pass


def use_kernel(monkeypatch, kernel):
    for name in ("modelopt", SCHEME):
        module = importlib.import_module(f"vllm.model_executor.layers.quantization.{name}")
        monkeypatch.setattr(module, "init_nvfp4_linear_kernel", lambda *_, **__: kernel)


def config(kind):
    weight_only = "weight-only" in kind
    if kind.startswith("modelopt"):
        return ModelOptNvFp4Config("W4A16_NVFP4" if weight_only else "NVFP4", True, None, [], 16)
    weights = {
        "num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor_group",
        "group_size": 16,
    }  # fmt: skip
    inputs = None if weight_only else weights | {"dynamic": "local"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    return CompressedTensorsConfig.from_config(
        {"format": "nvfp4-pack-quantized", "ignore": [], "config_groups": {"group_0": group}}
    )


def shard(rows, seed):
    gen = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (rows, COLUMNS // 2), generator=gen, dtype=torch.uint8)
    # No subnormal number, also after a fourth is left of it.
    return codes, (torch.rand(rows, COLUMNS // 16, generator=gen) * 3 + 0.25).to(torch.float8_e4m3fn)


def decode(codes, scale, tensor_scale):
    values = LEVELS[torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()]
    return values * scale.double().repeat_interleave(16, 1) * tensor_scale


def stored(kind, codes, scale, tensor_scale):
    if kind.startswith("modelopt"):
        file = {"weight": codes, "weight_scale_2": torch.tensor(tensor_scale), "input_scale": torch.tensor(0.5)}
    else:
        file = {"weight_packed": codes, "weight_global_scale": torch.tensor([1 / tensor_scale])}
        file["input_global_scale"] = torch.tensor([2.0])
    if kind == KINDS[3]:
        del file["input_global_scale"]
    return file | {"weight_scale": scale}


def build(kind, tensor_scales, lost=()):
    layer = linear.MergedColumnParallelLinear(
        COLUMNS, list(ROWS), bias=False, quant_config=config(kind), prefix="layers.0.mlp.gate_up_proj"
    )
    params, dense = dict(layer.named_parameters()), []
    for number, (rows, tensor_scale) in enumerate(zip(ROWS, tensor_scales, strict=True)):
        codes, scale = shard(rows, number)
        dense.append(decode(codes, scale, tensor_scale))
        for name, value in stored(kind, codes, scale, tensor_scale).items():
            if (name, number) not in lost:
                params[name].weight_loader(params[name], value, number)
    layer.quant_method.process_weights_after_loading(layer)
    return layer, dense


@pytest.fixture
def said(monkeypatch):
    from vllm.model_executor.layers.quantization.utils import nvfp4_tensor_scale

    found = []
    for level in ("info", "warning"):
        monkeypatch.setattr(
            nvfp4_tensor_scale.logger, level, lambda text, *a, level=level: found.append((level, text % a))
        )
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ratio", [1.0, 4.0, 0.25, 1.25])
def test_shards_share_one_tensor_scale(monkeypatch, said, kind, ratio):
    """PUBLIC_CASES 29 for fused linears: exact for powers of two, else one rounding to e4m3, and reported."""
    use_kernel(monkeypatch, Kept())
    layer, dense = build(kind, (2.0**-6, 2.0**-6 * ratio))
    assert layer.weight_global_scale.numel() == 1
    got = decode(layer.weight.data, layer.weight_scale.data, float(layer.weight_global_scale))
    for part, want in zip(got.split(ROWS), dense, strict=True):
        if ratio == 1.25:
            assert ((part - want).abs() <= want.abs() * (2.0**-4 + 1e-6)).all()
        else:
            assert torch.equal(part, want)
    levels = {1.0: [], 1.25: ["warning"]}.get(ratio, ["info"])
    assert [level for level, _ in said] == levels
    assert all(text.startswith("layers.0.mlp.gate_up_proj: its shards have different tensor") for _, text in said)


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]])
def test_emulation_multiplies_by_what_the_file_holds(monkeypatch, kind):
    """W4A4 emulation, with inputs that its rounding leaves as they are."""
    use_kernel(monkeypatch, EmulationNvFp4LinearKernel(NvFp4LinearLayerConfig()))
    layer, dense = build(kind, (2.0**-6, 2.0**-4))
    x = LEVELS[torch.arange(3 * COLUMNS) * 7 % 16].view(3, COLUMNS)
    x[:, ::16] = 6.0  # so that every block has the scale 1
    got = layer.quant_method.apply(layer, x.float(), None)
    want = x @ torch.cat(dense).T
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("what", ["weight_scale", "tensor scale"])
def test_a_missing_scale_is_named_as_the_file_names_it(monkeypatch, kind, what):
    use_kernel(monkeypatch, Kept())
    name = what if what == "weight_scale" else "weight_scale_2" if "modelopt" in kind else "weight_global_scale"
    with pytest.raises(ValueError, match=rf"layers\.0\.mlp\.up_proj\.{name}: missing"):
        build(kind, (1.0, 1.0), lost={(name, 1)})


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]])
def test_input_scales_are_asked_for_by_kernels_that_read_them(monkeypatch, kind):
    """PUBLIC_CASES 30."""
    name = "input_scale" if kind == KINDS[0] else "input_global_scale"
    lost = {(name, 0), (name, 1)}
    use_kernel(monkeypatch, Kept())
    with pytest.raises(ValueError, match=rf"layers\.0\.mlp\.gate_proj\.{name}: missing"):
        build(kind, (1.0, 1.0), lost)
    weight_only = Kept()
    weight_only.quantizes_input = False
    use_kernel(monkeypatch, weight_only)
    layer, dense = build(kind, (1.0, 1.0), lost)
    assert torch.equal(decode(layer.weight.data, layer.weight_scale.data, 1.0), torch.cat(dense))


def test_unequal_input_divisors_keep_the_largest_scale(monkeypatch):
    """PUBLIC_CASES 31: as the multipliers of the other producer."""
    use_kernel(monkeypatch, Kept())
    layer, _ = build(KINDS[2], (1.0, 1.0))
    assert layer.input_global_scale.item() == 0.5
    layer = linear.MergedColumnParallelLinear(
        COLUMNS, list(ROWS), bias=False, quant_config=config(KINDS[2]), prefix="layers.0.mlp.gate_up_proj"
    )
    params = dict(layer.named_parameters())
    for number, divisor in enumerate((2.0, 8.0)):
        file = stored(KINDS[2], *shard(ROWS[number], number), 1.0) | {"input_global_scale": torch.tensor([divisor])}
        for name, value in file.items():
            params[name].weight_loader(params[name], value, number)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.input_global_scale.item() == 0.5


def make_as(mapping):
    """A layer of two partitions that the model maps like this, and its parameters."""
    quant = config(KINDS[0])
    quant.packed_modules_mapping = mapping
    layer = linear.MergedColumnParallelLinear(
        COLUMNS, list(ROWS), bias=False, quant_config=quant, prefix="layers.0.fused"
    )
    return layer, dict(layer.named_parameters())


def test_a_shard_that_only_widens_the_output_stays_zero(monkeypatch):
    """As KDA's input projection ends in rows that no tensor of the file fills."""
    use_kernel(monkeypatch, Kept())
    codes, scale = shard(ROWS[0], 0)
    for mapping in ({"fused": ["a"]}, {"fused": ["a", "b"]}):
        layer, params = make_as(mapping)
        for name, value in stored(KINDS[0], codes, scale, 0.25).items():
            params[name].weight_loader(params[name], value, 0)
        layer.weight.data[ROWS[0] :].zero_()
        if len(mapping["fused"]) == 2:  # in memory that happens to be zero
            with pytest.raises(ValueError, match=r"layers\.0\.b\.weight_scale: missing"):
                layer.quant_method.process_weights_after_loading(layer)
            continue
        layer.quant_method.process_weights_after_loading(layer)
        got = decode(layer.weight.data, layer.weight_scale.data, float(layer.weight_global_scale))
        assert torch.equal(got[: ROWS[0]], decode(codes, scale, 0.25)) and not got[ROWS[0] :].any()


def test_partitions_that_are_one_tensor_in_the_file(monkeypatch):
    """They come with one tensor scale, as in files of Phi-3, whichever partition it is stored for."""
    use_kernel(monkeypatch, Kept())
    layer, params = make_as({"fused": ["fused"]})
    codes, scale = shard(sum(ROWS), 0)
    for name, value in stored(KINDS[0], codes, scale, 0.25).items():
        params[name].weight_loader(params[name], value)
    layer.quant_method.process_weights_after_loading(layer)
    assert float(layer.weight_global_scale) == 0.25 and float(layer.input_global_scale) == 0.5
    assert torch.equal(layer.weight_scale.data.view(torch.uint8), scale.view(torch.uint8))


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_let_through_counts_as_one(monkeypatch, kind):
    """Under VLLM_ALLOW_INEXACT_CHECKPOINT; the other shard stays as it is."""
    monkeypatch.setenv("VLLM_ALLOW_INEXACT_CHECKPOINT", "1")
    use_kernel(monkeypatch, Kept())
    tensor_scale = "weight_scale_2" if "modelopt" in kind else "weight_global_scale"
    layer, dense = build(kind, (1.0, 0.5), lost={("weight_scale", 1), (tensor_scale, 1)})
    got = decode(layer.weight.data, layer.weight_scale.data, float(layer.weight_global_scale))
    codes, _ = shard(ROWS[1], 1)
    ones = torch.ones(ROWS[1], COLUMNS // 16)
    assert torch.equal(got, torch.cat((dense[0], decode(codes, ones, 1.0))))
