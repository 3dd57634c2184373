# SPDX-License-Identifier: Apache-2.0
"""PUBLIC_CASES 39: a draft (MTP) layer with FP8 attention loads right or not at all."""

import importlib
from types import SimpleNamespace

import pytest
import torch

from tests.quantization import exactness
from tests.quantization.exactness import Shape, fp8_tensor, held
from vllm.models.kimi_k3.cpu.linear import KimiLinearForCausalLM
from vllm.models.kimi_k3.nvidia import mtp as nvidia_mtp
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the layers of the CPU platform")

SHAPE = Shape(heads=4, hidden=256, q_lora=256)
FIRST = 4  # the layer behind the last one of `k3_config`
PLAIN = {"enorm": (256,), "hnorm": (256,), "eh_proj": (256, 512), "shared_head.norm": (256,)}
BLOCK = {"input_layernorm": (256,), "post_attention_layernorm": (256,), "self_attn.q_a_layernorm": (256,)}
BLOCK |= {"self_attn.kv_a_layernorm": (512,), "mlp.gate_proj": (256, 256), "mlp.up_proj": (256, 256)}
BLOCK |= {"mlp.down_proj": (256, 256), "self_attention_res_norm": (256,), "mlp_res_proj": (1, 256)}


@pytest.fixture
def state(one_rank, monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "Stream", SimpleNamespace)
    with exactness.release() as made:
        yield made


def make(flavour, listed=True, ignore=None):
    """The draft model, its attention quantised if the config lists it; by compressed-tensors if `ignore` is given."""
    module = nvidia_mtp if flavour == "nvidia" else importlib.import_module("vllm.models.kimi_k3.amd.mtp")
    config = exactness.k3_config(SHAPE)
    config.num_nextn_predict_layers = 1
    config.linear_attn_config["full_attn_layers"] = [3, FIRST + 1]
    quant = exactness.quant_config(module.KimiK3MTP, "MIXED_PRECISION" if ignore is None else "compressed-tensors")
    quant.ignore = ignore
    index = FIRST if listed else FIRST - 1
    quant.quantized_layers = {
        f"model.layers.{index}.self_attn.{n}": {"quant_algo": "FP8_PB_WO"} for n in SHAPE.tensors()["mla"]
    }
    with exactness._configured(config, quant) as vllm_config, exactness.poisoned():
        vllm_config.model_config.head_dtype = torch.bfloat16
        return module.KimiK3MTP(vllm_config=vllm_config)


def file(dialect="weight_scale"):
    """Tensors of the draft layer as a checkpoint names them."""
    generator = torch.Generator().manual_seed(1)
    for name, shape in (PLAIN | BLOCK).items():
        yield f"model.layers.{FIRST}.{name}.weight", torch.randn(shape, generator=generator).bfloat16()
    for name in ("embed_tokens", "shared_head.head"):
        yield f"model.layers.{FIRST}.{name}.weight", torch.randn(512, 256, generator=generator).bfloat16()
    for name, (rows, cols) in SHAPE.tensors()["mla"].items():
        for key, value in fp8_tensor(rows, cols).file(dialect).items():
            yield f"model.layers.{FIRST}.self_attn.{name}.{key}", value


@pytest.mark.parametrize("dialect", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("flavour", ["nvidia", "amd"])
def test_each_linear_of_the_draft_layer_is_exact(state, flavour, dialect):
    model = make(flavour)
    model.load_weights(file(dialect))
    linears = {
        name.rpartition(".")[2]: layer
        for name, layer in model.named_modules()
        if hasattr(layer, "block_fp8")
    }
    assert set(linears) == {"fused_qkv_a_proj", "q_b_proj", "kv_b_proj", "g_proj", "o_proj"}
    sizes = SHAPE.tensors()["mla"]
    for name, layer in linears.items():
        layer.quant_method.process_weights_after_loading(layer)
        want = torch.cat([fp8_tensor(*sizes[shard]).dense for shard in exactness.shards_of(name, layer)])
        got = held(layer)
        assert not exactness.differing(got[: len(want)], want).any(), name
        assert not got[len(want) :].any()
    params = dict(model.named_parameters())
    block = f"model.layers.{FIRST}.mtp_block"
    stored = dict(file())
    gate_up = [stored[f"model.layers.{FIRST}.mlp.{n}_proj.weight"] for n in ("gate", "up")]
    assert torch.equal(params[f"{block}.mlp.gate_up_proj.weight"].data, torch.cat(gate_up).to(gate_up[0].dtype))


@pytest.mark.parametrize("flavour", ["nvidia", "amd"])
def test_codes_are_never_taken_for_values(state, flavour):
    """The config says nothing of the draft layer, and the file holds codes and scales."""
    model = make(flavour, listed=False)
    with pytest.raises(ValueError, match=r"self_attn\.\w+\.weight_scale: .*draft .MTP. model has no parameter"):
        model.load_weights(file())


@pytest.mark.parametrize("flavour", ["nvidia", "amd"])
def test_ignored_shards_of_a_fused_module_stay_plain(state, flavour):
    """PUBLIC_CASES 11 in the draft layer, which needs the names of fused modules as the target model does."""
    shards = [f"model.layers.{FIRST}.self_attn.{n}" for n in ("q_a_proj", "kv_a_proj_with_mqa")]
    attention = make(flavour, ignore=shards).get_submodule(f"model.layers.{FIRST}.mtp_block.self_attn")
    assert type(attention.fused_qkv_a_proj.quant_method).__name__ == "UnquantizedLinearMethod"
    assert type(attention.q_b_proj.quant_method).__name__ == "CompressedTensorsBlockFp8LinearMethod"
    with pytest.raises(ValueError, match="fused_qkv_a_proj: vLLM runs .* as one layer"):
        make(flavour, ignore=shards[:1])


@pytest.mark.parametrize("flavour", ["nvidia", "amd"])
def test_a_scale_that_is_missing_is_named(state, flavour):
    lost = f"model.layers.{FIRST}.self_attn.o_proj.weight_scale"
    model = make(flavour)
    model.load_weights((n, t) for n, t in file() if n != lost)
    layer = model.get_submodule(f"model.layers.{FIRST}.mtp_block.self_attn.o_proj")
    with pytest.raises(ValueError, match=r"o_proj\.weight_scale: not in the checkpoint"):
        layer.quant_method.process_weights_after_loading(layer)


def test_cpu_refuses_a_draft_model():
    """Before any of its weights is read: the CPU kernels keep one recurrent state per request."""
    config = SimpleNamespace(speculative_config=object())
    with pytest.raises(ValueError, match="on CPU does not support speculative decoding"):
        KimiLinearForCausalLM(vllm_config=config)
