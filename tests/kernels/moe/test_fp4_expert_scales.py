# SPDX-License-Identifier: Apache-2.0
"""Four-bit experts between loading and a kernel of any platform: what is missing, what pads.

No GPU is needed: the methods are those of a GPU, with a backend's name chosen for them, and the step that would
repack the weights is replaced by one that keeps what it is given.
"""

import importlib
import math
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.moe.test_cpu_compressed_experts import MxBank, compressed_mxfp4, compressed_nvfp4, divided
from tests.kernels.moe.test_cpu_experts import PREFIX, Bank, broken, load, make_layer, nvfp4
from vllm.model_executor.layers.fused_moe.expert_padding import clear_padding
from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config
from vllm.model_executor.layers.quantization.utils.unloaded import set_dummy_scales
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_processing,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="stands in for a GPU")

QUANTIZATION = "vllm.model_executor.layers.quantization"
COMPRESSED = f"{QUANTIZATION}.compressed_tensors.compressed_tensors_moe"

# Format → its config, a bank of experts, the bank's file.
FORMATS = {
    "modelopt": (nvfp4, Bank, lambda bank: bank.file()),
    "modelopt, weight-only": (lambda: ModelOptNvFp4Config("W4A16_NVFP4", True, None, [], 16), Bank, lambda b: b.file()),
    "compressed-tensors": (compressed_nvfp4, Bank, divided),
    "mxfp4": (Mxfp4Config, MxBank, lambda bank: bank.file("weight")),
    "compressed-tensors mxfp4": (compressed_mxfp4, MxBank, lambda bank: bank.file("weight_packed")),
}


class Repacked(Exception):
    """A kernel would repack the weights now."""


@pytest.fixture
def elsewhere(monkeypatch):
    """Methods of another platform; experts' weights as they are when a kernel gets them."""
    modules = [
        importlib.import_module(name)
        for name in (
            f"{QUANTIZATION}.modelopt", f"{QUANTIZATION}.mxfp4", f"{COMPRESSED}.compressed_tensors_moe",
            f"{COMPRESSED}.compressed_tensors_moe_w4a4_nvfp4", f"{COMPRESSED}.compressed_tensors_moe_w4a4_mxfp4",
        )
    ]  # fmt: skip
    gpu = SimpleNamespace(is_cpu=lambda: False, is_xpu=lambda: False, is_rocm=lambda: False)
    state = SimpleNamespace(backend=NvFp4MoeBackend.VLLM_CUTLASS)

    def stop(*_, **__):
        raise Repacked

    monkeypatch.setattr(oracle, "current_platform", gpu)
    for module in modules:
        for name, value in {
            "current_platform": gpu,
            "select_nvfp4_moe_backend": lambda *_, **__: (state.backend, None),
            "select_deepseek_v4_mxfp4_moe_backend": lambda *_, **__: ("some", None),
            "mxfp4_round_up_hidden_size_and_intermediate_size": lambda _, hidden, width, **__: (hidden, width),
            "convert_to_nvfp4_moe_kernel_format": stop,
            "prepare_moe_fp4_layer_for_marlin": stop,
        }.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(modules[1].Mxfp4MoEMethod, "_setup_kernel", stop)
    return state


def until_repacked(layer, file):
    with pytest.raises(Repacked):
        load(layer, file)


def make(config, kind, bank, **kwargs):
    quant = FORMATS[kind][0]()
    return make_layer(config, bank.experts, bank.hidden, kwargs.pop("width", bank.width), quant=quant, **kwargs)


@pytest.mark.parametrize("kind", FORMATS)
def test_padding_is_zero_when_a_kernel_gets_it(one_rank, elsewhere, kind):
    """PUBLIC_CASES 20: width 160 per rank over poisoned memory of width 192, on the second of two ranks."""
    alike = {} if "mxfp4" in kind else {"scales": lambda expert, shard: 2.0**-7}  # nothing to re-express
    bank = FORMATS[kind][1](3, 64, 320, **alike)
    layer = make(one_rank, kind, bank, width=2 * 192, tp_size=2)
    assert "CPU" not in str(getattr(layer.quant_method, "nvfp4_backend", ""))
    layer.moe_config.moe_parallel_config.tp_rank = 1
    layer.moe_config.intermediate_size_per_partition_unpadded = 160
    until_repacked(layer, FORMATS[kind][2](bank))
    block = 32 if "mxfp4" in kind else 16
    for name, at in (("weight", 0), ("weight_scale", 1)):
        w13 = getattr(layer, f"w13_{name}").view(torch.uint8).view(3, 2, 192, -1)
        w2 = getattr(layer, f"w2_{name}").view(torch.uint8)
        kept = 160 // (2, block)[at]
        assert not w13[:, :, 160:].any() and not w2[..., kept:].any()
        for e in range(3):
            for half, shard in enumerate(("w1", "w3")):
                assert torch.equal(w13[e, half, :160], bank.tensors[e, shard][at].view(torch.uint8)[160:])
            assert torch.equal(w2[e, :, :kept], bank.tensors[e, "w2"][at].view(torch.uint8)[:, kept:])


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16])
def test_padding_of_both_sizes(dtype):
    """Width 6 of 8 and hidden size 8 of 12, in items of two elements and of one."""
    items = 2 if dtype == torch.uint8 else 1
    layer = torch.nn.Module()
    layer.moe_config = SimpleNamespace(
        intermediate_size_per_partition_unpadded=6, hidden_dim_unpadded=8, is_act_and_mul=True
    )
    layer.w13_weight = torch.nn.Parameter(torch.ones(2, 16, 12 // items).to(dtype), requires_grad=False)
    layer.w2_weight = torch.nn.Parameter(torch.ones(2, 12, 8 // items).to(dtype), requires_grad=False)
    clear_padding(layer)
    want13, want2 = torch.zeros(2, 2, 8, 12 // items), torch.zeros(2, 12, 8 // items)
    want13[:, :, :6, : 8 // items] = 1
    want2[:, :8, : 6 // items] = 1
    assert torch.equal(layer.w13_weight.float().view(2, 2, 8, -1), want13)
    assert torch.equal(layer.w2_weight.float(), want2)


@pytest.mark.parametrize("change", ["missing", 0.0, math.inf, math.nan])
@pytest.mark.parametrize("tensor", ["2.w2.input_scale", "2.w2.weight_scale_2", "1.w3.weight_scale_2"])
def test_bad_tensor_scales_are_named(one_rank, elsewhere, tensor, change):
    """PUBLIC_CASES 30, where activations are quantised."""
    bank = Bank(3, 64, 32)
    layer = make(one_rank, "modelopt", bank)
    with pytest.raises(ValueError, match=rf"{PREFIX}\.{tensor}: (missing|found)"):
        load(layer, broken(bank, tensor, change))


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("tensor", ["2.w2.weight_scale", "1.w3.weight_scale"])
def test_missing_block_scales_are_named(one_rank, elsewhere, kind, tensor):
    bank = FORMATS[kind][1](3, 64, 32)
    layer = make(one_rank, kind, bank)
    file = [(name, value) for name, value in FORMATS[kind][2](bank) if name != tensor]
    with pytest.raises(ValueError, match=rf"{PREFIX}\.{tensor}: missing or NaN"):
        load(layer, file)


@pytest.mark.parametrize("kind, backend", [("modelopt", "MARLIN"), ("modelopt, weight-only", "FLASHINFER_B12X")])
def test_a_weight_only_backend_needs_no_input_scale(one_rank, elsewhere, kind, backend):
    """PUBLIC_CASES 30: a weight-only file runs weight-only."""
    elsewhere.backend = NvFp4MoeBackend[backend]
    bank = Bank(3, 64, 32)
    until_repacked(make(one_rank, kind, bank), bank.file(input_scales=False))
    elsewhere.backend = NvFp4MoeBackend.FLASHINFER_TRTLLM
    with pytest.raises(ValueError, match="0.w1.input_scale: missing"):
        load(make(one_rank, "modelopt", bank), bank.file(input_scales=False))


def test_input_scales_of_all_ranks_are_named_by_expert(one_rank, elsewhere):
    """A backend that reads the input scales of remote experts too: expert 3 is remote here, and lacks its own."""
    elsewhere.backend = NvFp4MoeBackend.FLASHINFER_TRTLLM
    bank = Bank(4, 64, 32)
    layer = make(one_rank, "modelopt", bank)
    layer._expert_map = torch.tensor([-1, 0, 1, -1], dtype=torch.int32)
    layer.local_num_experts = 2
    with pytest.raises(ValueError, match=rf"{PREFIX}\.3\.w1\.input_scale: missing"):
        load(layer, ((n, v) for n, v in bank.file() if n != "3.w1.input_scale"))


def test_redundant_experts_are_named_by_what_they_copy(one_rank, elsewhere):
    bank = Bank(4, 64, 32)
    layer = make(one_rank, "modelopt", Bank(6, 64, 32))
    layer.moe_config.num_logical_experts = 4  # the fifth is the first again
    file = [(n, v) for n, v in bank.file() if n != "0.w2.weight_scale_2"]
    with pytest.raises(ValueError, match=rf"{PREFIX}\.0\.w2\.weight_scale_2: missing"):
        load(layer, file)
    layer = make(one_rank, "modelopt", Bank(6, 64, 32))
    layer.moe_config.num_logical_experts = 4
    for _ in layer.load_weights(bank.file()):
        pass
    layer.w2_weight_scale_2.data[4] = math.nan
    with pytest.raises(ValueError, match=rf"{PREFIX}\.0\.w2\.weight_scale_2: missing"):
        layer.quant_method.process_weights_after_loading(layer)


def test_experts_that_a_model_has_zeroed_are_no_fault(one_rank, elsewhere):
    """They fill up a rank, and no token reaches them; a zero scale of anything else is refused."""
    bank = Bank(3, 64, 32)
    for zeroed in (True, False):
        layer = make(one_rank, "modelopt", bank)
        for _ in layer.load_weights(bank.file()):
            pass
        for name, param in layer.named_parameters():
            if "input" not in name and (zeroed or name == "w2_weight_scale_2"):
                param.data[2].zero_()
        if zeroed:
            until_repacked(layer, [])
            assert layer.w2_weight_scale_2[2] == 1 and not layer.w2_weight_scale[2].float().any()
        else:
            with pytest.raises(ValueError, match=rf"{PREFIX}\.2\.w2\.weight_scale_2: found 0"):
                load(layer, [])


def test_dummy_weights_have_usable_scales(one_rank, elsewhere):
    """What stands for a file under --load-format dummy, for floats and for integers."""
    for kind in ("modelopt", "mxfp4"):
        layer = make(one_rank, kind, FORMATS[kind][1](2, 64, 32))
        set_dummy_scales(layer)
        until_repacked(layer, [])


def fill_(tensor):
    return tensor.copy_(torch.ones(tensor.shape))


@pytest.mark.parametrize("lost", ["1.w2.weight_scale_2", "1.w2.weight_scale", "0.w1.weight_scale"])
def test_a_reload_misses_what_it_lacks(one_rank, monkeypatch, lost):
    """Memory that a reload brings holds the last number that anybody left there, here 1."""
    bank = Bank(2, 64, 32)
    layer = make_layer(one_rank, 2, 64, 32, quant=nvfp4())
    record_metadata_for_reloading(layer)
    load(layer, bank.file())
    empty = torch.empty_strided
    monkeypatch.setattr(torch, "empty_strided", lambda *a, **k: fill_(empty(*a, **k)))
    initialize_layerwise_reload(layer)
    with pytest.raises(ValueError, match=rf"{PREFIX}\.{lost}: missing or NaN"):
        for _ in layer.load_weights((n, v) for n, v in bank.file() if n != lost):
            pass
        finalize_layerwise_processing(layer, SimpleNamespace(dtype=torch.float32))
