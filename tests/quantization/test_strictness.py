# SPDX-License-Identifier: Apache-2.0
"""What is refused, and what becomes of it under VLLM_ALLOW_INEXACT_CHECKPOINT."""

import re

import pytest
import torch

from tests.kernels.moe.test_cpu_compressed_experts import MxBank
from tests.kernels.moe.test_cpu_experts import PREFIX, Bank, broken, load, make_layer, nvfp4
from vllm import envs
from vllm.checkpoint import strictness
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.quantization.compressed_tensors.names import find_target
from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config, ModelOptMixedPrecisionConfig
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config
from vllm.model_executor.layers.quantization.utils.modelopt_names import canonical_table, find_algo, is_excluded
from vllm.models.kimi_k3.common.parameters import Parameters
from vllm.platforms import current_platform

pytestmark = [
    pytest.mark.skipif(not current_platform.is_cpu(), reason="CPU kernels"),
    pytest.mark.usefixtures("one_rank"),
]

OPTION = "VLLM_ALLOW_INEXACT_CHECKPOINT"
FUSED = {"gate_up_proj": ["gate_proj", "up_proj"]}
NAME = "model.layers.0.mlp.gate_up_proj"


def test_it_is_off_by_default(monkeypatch):
    monkeypatch.delenv(OPTION, raising=False)
    assert OPTION in envs.environment_variables  # so that no start warns of an unknown variable
    assert envs.VLLM_ALLOW_INEXACT_CHECKPOINT is False
    for value, on in (("0", False), ("1", True)):
        monkeypatch.setenv(OPTION, value)
        assert envs.VLLM_ALLOW_INEXACT_CHECKPOINT is on


@pytest.fixture
def both_ways(monkeypatch):
    """Check that something is refused by default, and let through with a warning that says the same."""

    def check(action, message):
        said = []
        monkeypatch.setattr(strictness.logger, "warning", lambda text, *a: said.append(text % a))
        monkeypatch.delenv(OPTION, raising=False)
        with pytest.raises(ValueError, match=message):
            action()
        assert not said
        monkeypatch.setenv(OPTION, "1")
        result = action()
        assert said and all(OPTION in text for text in said)
        assert any(re.search(message, text) for text in said), said
        return result, said

    return check


def mixed(layers):
    return ModelOptMixedPrecisionConfig.from_config(
        {
            "quant_method": "modelopt_mixed", "quant_algo": "MIXED_PRECISION", "group_size": 16,
            "quantized_layers": {n: {"quant_algo": a} for n, a in layers.items()}, "exclude_modules": [],
        }
    )  # fmt: skip


def test_unknown_algorithm(both_ways):
    """PUBLIC_CASES 3: named; if let through, the layer runs unquantised."""
    name = "model.layers.0.self_attn.o_proj"

    def build():
        return linear.ReplicatedLinear(64, 32, bias=False, quant_config=mixed({name: "FP8_PB"}), prefix=name)

    layer, said = both_ways(build, r"self_attn\.o_proj: quant_algo 'FP8_PB' is not supported")
    assert layer.weight.dtype == torch.get_default_dtype() and len(said) == 2  # by the config, and by the layer


def test_half_listed_fused_layers(both_ways):
    """PUBLIC_CASES 7 and 11: the first shard decides, or the first one that is listed."""
    table = {"layers.0.mlp.up_proj": "FP8"}
    algo, _ = both_ways(lambda: find_algo(NAME, table, FUSED), "lists .'up_proj'. but not .'gate_proj'.")
    assert algo == "FP8"
    table = {"layers.0.mlp.gate_proj": "NVFP4", "layers.0.mlp.up_proj": "FP8"}
    assert both_ways(lambda: find_algo(NAME, table, FUSED), "different algorithms")[0] == "NVFP4"
    for shard, excluded in (("gate_proj", True), ("up_proj", False)):
        found, _ = both_ways(lambda s=shard: is_excluded(NAME, [f"*.{s}"], FUSED), f"excludes .'{shard}'. but not")
        assert found is excluded
        target, _ = both_ways(
            lambda s=shard: find_target(NAME, "Linear", {"Linear": {"a": 1}}, [f"re:.*{s}"], FUSED),
            f"{shard} is not quantised",
        )
        assert target == (None if excluded else "Linear")


def test_two_spellings_that_disagree(both_ways):
    layers = {"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}, "layers.0.mlp.up_proj": {"quant_algo": "NVFP4"}}
    assert both_ways(lambda: canonical_table(layers), "the same module")[0] == {"layers.0.mlp.up_proj": "FP8"}


def test_a_tensor_that_nobody_reads(both_ways):
    """A scale of a layer that the config does not list, and a tensor of another model."""
    params = Parameters(a=1)
    assert params["a"] == 1 and "b" not in params
    nowhere, _ = both_ways(lambda: params["x.o_proj.weight_scale"], r"x\.o_proj\.weight_scale: nobody reads this scale")
    nowhere.weight_loader(nowhere, torch.ones(2), 3)
    both_ways(lambda: params["x.y.weight"], r"x\.y\.weight: the model has no such parameter")


def block_fp8(file):
    """A 128-row FP8_PB_WO layer, loaded; its weight as the file's numbers say."""
    layer = linear.ReplicatedLinear(
        128, 128, bias=False, quant_config=ModelOptFp8Config("FP8_PB_WO", True, None, []), prefix="m.o_proj"
    )
    params = dict(layer.named_parameters())
    for name, value in file.items():
        params[name].weight_loader(params[name], value)
    layer.quant_method.process_weights_after_loading(layer)
    return layer.quant_method.dequantized_weight(layer, torch.float32)


CODES = (torch.arange(128 * 128) % 120).to(torch.uint8).view(128, 128)
FILE = {"weight": CODES.view(torch.float8_e4m3fn), "weight_scale": torch.full((1, 1, 1, 1), 0.25)}


def test_a_weight_that_is_not_fp8(both_ways):
    """PUBLIC_CASES 5: taken by value, under the scale that is there or 1."""
    plain = {"weight": torch.full((128, 128), 3.0, dtype=torch.bfloat16)}
    got, said = both_ways(lambda: block_fp8(plain), r"m\.o_proj\.weight: expected float8_e4m3fn .*bfloat16")
    assert (got == 3.0).all() and any("m.o_proj.weight_scale: not in the checkpoint" in text for text in said)


@pytest.mark.parametrize(
    "file, message, factor",
    [
        ({"weight": FILE["weight"]}, r"m\.o_proj\.weight_scale: not in the checkpoint", 1.0),
        ({"weight_scale": FILE["weight_scale"]}, r"m\.o_proj\.weight: not in the checkpoint", 0.0),
        (FILE | {"weight_scale": FILE["weight_scale"] * torch.nan}, r"m\.o_proj\.weight_scale: holds NaN", 1.0),
        (FILE | {"weight_scale": FILE["weight_scale"].double()}, r"m\.o_proj\.weight_scale: .*float64", 0.25),
    ],
    ids=["no scale", "no weight", "NaN", "float64"],
)
def test_block_fp8_parameters_at_their_sentinel(both_ways, file, message, factor):
    """A missing scale counts as 1, a missing weight as 0."""
    got, _ = both_ways(lambda: block_fp8(file), message)
    assert torch.equal(got, FILE["weight"].float() * factor if factor else torch.zeros(128, 128))


def test_what_cannot_be_read_at_all_is_refused_either_way(monkeypatch):
    monkeypatch.setenv(OPTION, "1")
    with pytest.raises(ValueError, match=r"m\.o_proj\.weight: expected .*\(128, 128\)"):
        block_fp8({"weight": FILE["weight"][:64]})
    with pytest.raises(ValueError, match="found torch.uint8"):
        block_fp8({"weight_scale": torch.zeros(1, 1, dtype=torch.uint8)})


@pytest.mark.parametrize("change", ["missing", 0.0])
@pytest.mark.parametrize("tensor", ["1.w2.weight_scale_2", "1.w3.weight_scale_2", "1.w2.input_scale"])
def test_tensor_scales_of_experts(one_rank, both_ways, tensor, change):
    """PUBLIC_CASES 30: the missing one counts as 1, and no other is touched."""
    bank = Bank(2, 64, 32)

    def build():
        return load(make_layer(one_rank, 2, 64, 32, quant=nvfp4()), broken(bank, tensor, change))

    layer, said = both_ways(build, rf"{PREFIX}\.{tensor}: (missing|found 0)")
    assert len(said) == 1
    for e in range(2):
        for shard, held in (("w1", layer.w13_weight_scale_2[e, 0]), ("w3", layer.w13_weight_scale_2[e, 1]),
                            ("w2", layer.w2_weight_scale_2[e])):  # fmt: skip
            lost = tensor == f"{e}.{shard}.weight_scale_2"
            assert held == (1.0 if lost else bank.tensors[e, shard][2])


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp4"])
def test_block_scales_of_experts(one_rank, both_ways, kind):
    bank = (Bank if kind == "nvfp4" else MxBank)(3, 64, 32)
    lost = ("0.w3.weight_scale", "2.w2.weight_scale")

    def build():
        file = bank.file() if kind == "nvfp4" else bank.file("weight")
        quant = nvfp4() if kind == "nvfp4" else Mxfp4Config()
        return load(make_layer(one_rank, 3, 64, 32, quant=quant), ((n, v) for n, v in file if n not in lost))

    layer, said = both_ways(build, rf"{PREFIX}\.0\.w3\.weight_scale: missing or NaN")
    assert len(said) == 2 and f"{PREFIX}.2.w2.weight_scale: missing" in said[1]
    one = 0x38 if kind == "nvfp4" else 127
    w13, w2 = (getattr(layer, f"{bank}_weight_scale").view(torch.uint8) for bank in ("w13", "w2"))
    assert (w13[0, 32:] == one).all() and (w2[2] == one).all()
    assert torch.equal(w13[0, :32], bank.tensors[0, "w1"][1].view(torch.uint8))
