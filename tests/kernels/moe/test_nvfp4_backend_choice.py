# SPDX-License-Identifier: Apache-2.0
"""Which NVFP4 and MXFP4 experts run on Hopper, and what loading hands to them.

The real choice, loading and conversion run here; what needs the card is left out.
"""

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.moe.test_cpu_compressed_experts import MxBank, compressed_nvfp4, divided
from tests.kernels.moe.test_cpu_experts import BETA, LINEAR_BETA, Bank, decode, load, make_layer, nvfp4
from vllm.model_executor.layers.fused_moe.experts import nvfp4_situ_sm90 as sm90
from vllm.model_executor.layers.fused_moe.experts.nvfp4_situ_sm90_layout import (
    dequantize_packed,
    down_rows,
    gate_up_rows,
    mxfp4_as_nvfp4,
)
from vllm.model_executor.layers.fused_moe.oracle import mxfp4 as mx_oracle
from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle
from vllm.model_executor.layers.quantization import modelopt, mxfp4
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_processing,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="stands in for a card")

SITU_SM90 = oracle.NvFp4MoeBackend.SITU_SM90
WIDTH, HIDDEN, EXPERTS = 96, 128, 3


@pytest.fixture
def hopper(monkeypatch):
    """The code that chooses and loads takes this host for one with a Hopper card."""
    card = SimpleNamespace(is_cpu=lambda: False, is_rocm=lambda: False, is_xpu=lambda: False)
    for module in (oracle, mx_oracle, modelopt, mxfp4):
        monkeypatch.setattr(module, "current_platform", card)
    monkeypatch.setattr(sm90.NvFp4SituSm90Experts, "_supports_current_device", staticmethod(lambda: True))
    prepared = []
    monkeypatch.setattr(sm90, "prepare_kernels", lambda device, *shape: prepared.append(shape))
    return prepared


def build(config, quant, **kwargs):
    return make_layer(config, EXPERTS, HIDDEN, WIDTH, quant=quant, **{"dtype": torch.bfloat16} | kwargs)


@pytest.mark.parametrize("backend", ["auto", "situ_sm90"])
@pytest.mark.parametrize("quant", [nvfp4, compressed_nvfp4])
def test_situ_on_hopper_takes_its_own_kernel(one_rank, hopper, quant, backend):
    method = build(one_rank, quant(), backend=backend).quant_method
    assert method.nvfp4_backend == SITU_SM90
    assert method.experts_cls is sm90.NvFp4SituSm90Experts


@pytest.mark.parametrize(
    "change,reason",
    [
        ({"activation": "silu"}, "activation"),
        ({"dtype": torch.float16}, "float16"),
        ({"dtype": torch.float32}, "float32"),
    ],
)
def test_what_the_kernel_cannot_do_is_refused_by_name(one_rank, hopper, change, reason):
    with pytest.raises(ValueError, match=f"SITU_SM90.*{reason}"):
        build(one_rank, nvfp4(), backend="situ_sm90", **change)


def test_a_backend_without_situ_is_refused_by_name(one_rank, hopper):
    with pytest.raises(ValueError, match="VLLM_CUTLASS"):
        build(one_rank, nvfp4(), backend="cutlass")


def test_the_choice_is_logged_with_its_reason(one_rank, hopper, monkeypatch):
    said = []
    monkeypatch.setattr(sm90.logger, "info_once", lambda text, *args: said.append(text % args))
    build(one_rank, nvfp4())
    assert any("SITU_SM90" in line and "no FP4" in line for line in said)
    with pytest.raises(ValueError):
        build(one_rank, nvfp4(), backend="situ_sm90", dtype=torch.float16)
    assert "not taken" in said[-1] and "float16" in said[-1]
    monkeypatch.setattr(sm90.NvFp4SituSm90Experts, "_supports_current_device", staticmethod(lambda: False))
    count = len(said)
    with pytest.raises(ValueError, match="SITU_SM90"):
        build(one_rank, nvfp4(), backend="situ_sm90")
    assert len(said) == count


@pytest.mark.parametrize("compressed_file", [False, True])
def test_loading_packs_codes_and_keeps_every_tensor_scale(one_rank, hopper, compressed_file):
    """w1 and w3 scaled 1, 2, 5 and 1, 4, 3: an expert whose halves share a scale is another model."""
    scales = {"w1": (1.0, 2.0, 5.0), "w3": (1.0, 4.0, 3.0), "w2": (0.5, 3.0, 7.0)}
    bank = Bank(EXPERTS, HIDDEN, WIDTH, scales=lambda e, shard: scales[shard][e])
    layer = build(one_rank, compressed_nvfp4() if compressed_file else nvfp4())
    load(layer, divided(bank) if compressed_file else bank.file())

    assert hopper == [(HIDDEN, 128)]
    experts = layer.quant_method.moe_kernel.fused_experts
    alphas = torch.tensor([scales["w1"], scales["w3"]]).T
    torch.testing.assert_close(experts.g1_alphas, alphas, rtol=1e-6, atol=0)
    torch.testing.assert_close(experts.g2_alphas, torch.tensor(scales["w2"]), rtol=1e-6, atol=0)
    assert experts.activation_config.activation_situ_beta == BETA
    assert experts.activation_config.activation_situ_linear_beta == LINEAR_BETA

    padded = WIDTH + -WIDTH % 128
    for expert in range(EXPERTS):
        w13 = dequantize_packed(layer.w13_weight[expert], experts.w1_scale[expert], gate_up_rows(padded))
        w2 = dequantize_packed(layer.w2_weight[expert], experts.w2_scale[expert], down_rows(HIDDEN))
        for held, shard in ((w13[:WIDTH], "w1"), (w13[padded : padded + WIDTH], "w3"), (w2[:, :WIDTH], "w2")):
            codes, block, _ = bank.tensors[expert, shard]
            assert torch.equal(held.double(), decode(codes, block, 1.0) + 0.0), (expert, shard)


@pytest.mark.parametrize("width", [128, WIDTH])
def test_packing_needs_no_second_bank_and_a_reload_keeps_addresses(one_rank, hopper, width):
    """Without padding the packed experts lie where they were loaded, after a reload where graphs read them."""
    names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
    banks = [Bank(EXPERTS, HIDDEN, width, seed=seed) for seed in (0, 1)]
    layers = [make_layer(one_rank, EXPERTS, HIDDEN, width, quant=nvfp4(), dtype=torch.bfloat16) for _ in banks]
    layer, fresh = layers
    record_metadata_for_reloading(layer)
    loaded = [getattr(layer, name).data_ptr() for name in names]
    load(layer, banks[0].file())
    packed = [getattr(layer, name).data_ptr() for name in names]
    assert (packed == loaded) == (width == 128)

    initialize_layerwise_reload(layer)
    for _ in layer.load_weights(banks[1].file()):
        pass
    finalize_layerwise_processing(layer, SimpleNamespace(dtype=torch.bfloat16))
    load(fresh, banks[1].file())
    assert [getattr(layer, name).data_ptr() for name in names] == packed
    for name in names:
        assert torch.equal(getattr(layer, name), getattr(fresh, name)), name


def test_moving_an_expert_moves_all_that_belongs_to_it(one_rank, hopper):
    """PUBLIC_CASES 33: what re-arrangement permutes is what the kernel reads."""
    bank = Bank(EXPERTS, HIDDEN, WIDTH, scales=lambda e, shard: 2.0 ** (e + len(shard)))
    layer = load(build(one_rank, nvfp4()), bank.file())
    experts = layer.quant_method.moe_kernel.fused_experts
    read = [layer.w13_weight, layer.w2_weight, experts.w1_scale, experts.w2_scale, experts.g1_alphas, experts.g2_alphas]
    before = [t.clone() for t in read]
    moved = list(layer.get_expert_weights())
    assert all(t.shape[0] == EXPERTS and t.is_contiguous() for t in moved)
    for tensor in moved:
        tensor.copy_(tensor[[2, 1, 0]].clone())
    for tensor, old in zip(read, before):
        assert torch.equal(tensor.view(torch.uint8), old[[2, 1, 0]].view(torch.uint8))


# ---- MXFP4 through the same kernel -------------------------------------------------


def test_native_mxfp4_takes_the_same_kernel_bit_for_bit(one_rank, hopper):
    """Codes times block scales times tensor scale, read out of the packed layout, are the file's values."""
    bank = MxBank(EXPERTS, HIDDEN, WIDTH)
    layer = load(build(one_rank, mxfp4.Mxfp4Config()), bank.file("weight"))
    assert layer.quant_method.mxfp4_backend == mx_oracle.Mxfp4MoeBackend.SITU_SM90
    experts = layer.quant_method.moe_kernel.fused_experts
    assert type(experts) is sm90.Mxfp4SituSm90Experts
    assert hopper == [(HIDDEN, 128)]
    assert experts.activation_config.activation_situ_linear_beta == LINEAR_BETA
    moved = {t.data_ptr() for t in layer.get_expert_weights()}
    assert {experts.g1_alphas.data_ptr(), experts.g2_alphas.data_ptr()} <= moved

    padded = WIDTH + -WIDTH % 128
    for expert in range(EXPERTS):
        w13 = dequantize_packed(layer.w13_weight[expert], experts.w1_scale[expert], gate_up_rows(padded))
        w2 = dequantize_packed(layer.w2_weight[expert], experts.w2_scale[expert], down_rows(HIDDEN))
        gate, up = experts.g1_alphas[expert].double()
        down = experts.g2_alphas[expert].double()
        assert torch.equal(w13[:WIDTH].double() * gate, bank.dense("w1")[expert] + 0.0)
        assert torch.equal(w13[padded : padded + WIDTH].double() * up, bank.dense("w3")[expert] + 0.0)
        assert torch.equal(w2[:, :WIDTH].double() * down, bank.dense("w2")[expert] + 0.0)


@pytest.mark.parametrize("halves", [1, 2])
def test_every_exponent_that_fits_is_exact(halves):
    """18 neighbouring powers of two, the largest of each part elsewhere; empty blocks may say anything."""
    codes = torch.randint(0, 256, (2, 36, 16), dtype=torch.uint8)
    codes[..., 0] = 0x21
    scale = torch.arange(36, dtype=torch.int32)[None, :, None] % 18 + 100
    scale = (scale + torch.tensor([[[0]], [[37]]])).to(torch.uint8)
    codes[1, 5], scale[1, 5] = 0x80, 0  # -0 and 0 times 2**-127
    codes[0, 7], scale[0, 7] = 0, 254
    block, tensor = mxfp4_as_nvfp4(codes, scale, halves)
    got = torch.stack([decode(c, b, 1.0) for c, b in zip(codes, block)])
    got *= tensor.double().repeat_interleave(36 // halves, 1)[..., None]
    want = torch.stack([decode(c, torch.ones(36, 2), 1.0) for c in codes]) * 2.0 ** (scale.double() - 127)
    assert torch.equal(got + 0.0, want + 0.0)


def test_exponents_too_far_apart_are_refused():
    codes = torch.full((3, 4, 16), 0x11, dtype=torch.uint8)
    scale = torch.full((3, 4, 1), 120, dtype=torch.uint8)
    scale[2, 3] = 120 - 18
    mxfp4_as_nvfp4(codes[:2], scale[:2], 2)
    with pytest.raises(ValueError, match=r"expert 2, part 1 of 2.*2\*\*18 apart.*marlin"):
        mxfp4_as_nvfp4(codes, scale, 2)
