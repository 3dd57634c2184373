# SPDX-License-Identifier: Apache-2.0
"""Scales that TRTLLM's NVFP4 experts hand to their kernel, captured on any machine.

The kernel's contract, in float64: with accumulators ``a_g, a_u`` of the first
GEMM over stored codes,

- SiTU:   ``y = situ(a_g * gate, a_u * gate) * scalar``
- SwiGLU: ``y = silu(a_g * gate) * a_u * scalar``

where ``gate`` is ``output1_scale_gate_scalar`` and ``scalar`` is
``output1_scale_scalar``; ``y`` must be the activation of the dequantised halves,
divided by the second GEMM's input scale.
"""

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.kernels.moe.test_cpu_experts import Bank, load, make_layer, nvfp4, reference, routed, run, situ
from tests.kernels.moe.test_expert_rearrangement import rearrange
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import nvfp4_moe_quant_config
from vllm.model_executor.layers.fused_moe.experts import trtllm_nvfp4_moe as trtllm

EXPERTS, BETA, LINEAR_BETA = 4, 4.0, 25.0


@pytest.fixture
def kernel(monkeypatch):
    """A FlashInfer that records what its routed kernel is called with."""
    calls = []
    flashinfer = ModuleType("flashinfer")
    flashinfer.fused_moe = SimpleNamespace(trtllm_fp4_block_scale_routed_moe=lambda **kwargs: calls.append(kwargs))
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: "cpu")
    monkeypatch.setattr(trtllm, "has_flashinfer_situ_activation", lambda: True)
    monkeypatch.setattr(trtllm, "activation_to_flashinfer_int", lambda activation: activation)
    monkeypatch.setattr(trtllm, "fi_moe_largest_bucket", lambda config: 8)
    monkeypatch.setattr(trtllm, "trtllm_moe_pack_topk_ids_weights", lambda ids, weights: ids)
    return calls


def make(activation, weight_scale_2, input_scale, situ=(BETA, LINEAR_BETA)):
    """Experts and layer after loading; scales are float32 ``[EXPERTS]`` pairs (w13, w2)."""
    w13_scale_2, w2_scale_2 = (s.clone() for s in weight_scale_2)
    layer = torch.nn.Module()
    for name, value in (("w13", w13_scale_2), ("w2", w2_scale_2)):
        layer.register_parameter(f"{name}_weight_scale_2", torch.nn.Parameter(value, requires_grad=False))
    layer.w13_input_scale, layer.w2_input_scale = input_scale
    quant_config = nvfp4_moe_quant_config(
        g1_alphas=layer.w13_weight_scale_2,
        g2_alphas=layer.w2_weight_scale_2,
        a1_gscale=1.0 / input_scale[0],
        a2_gscale=1.0 / input_scale[1],
        w1_scale=torch.zeros(EXPERTS, 2, 1, dtype=torch.float8_e4m3fn),
        w2_scale=torch.zeros(EXPERTS, 2, 1, dtype=torch.float8_e4m3fn),
    )
    moe_config = SimpleNamespace(
        routing_method=None,
        experts_per_token=1,
        intermediate_size_per_partition=16,
        hidden_dim=16,
        hidden_dim_unpadded=None,
        num_experts=EXPERTS,
        num_local_experts=EXPERTS,
        moe_parallel_config=SimpleNamespace(ep_rank=0),
        is_act_and_mul=activation.is_gated,
        activation=activation,
        activation_situ_beta=situ[0],
        activation_situ_linear_beta=situ[1],
    )
    experts = object.__new__(trtllm.TrtLlmNvFp4ExpertsModular)
    trtllm.TrtLlmNvFp4ExpertsBase.__init__(experts, moe_config, quant_config)
    experts.process_weights_after_loading(layer)
    return experts, layer


def call(experts, activation, calls):
    experts.apply(
        output=torch.empty(1, 16),
        hidden_states=torch.zeros(1, 8, dtype=torch.uint8),
        w1=torch.zeros(1),
        w2=torch.zeros(1),
        topk_weights=torch.ones(1, 1),
        topk_ids=torch.zeros(1, 1, dtype=torch.int32),
        activation=activation,
        global_num_experts=EXPERTS,
        expert_map=None,
        a1q_scale=torch.zeros(1, 1, dtype=torch.float8_e4m3fn),
        a2_scale=None,
        workspace13=torch.empty(0),
        workspace2=torch.empty(0),
        expert_tokens_meta=None,
        apply_router_weight_on_input=False,
    )
    return calls.pop()


def scales(seed=0):
    """Unlike per expert, none of them 1."""
    g = torch.Generator().manual_seed(seed)
    w2 = [torch.rand(EXPERTS, generator=g) * 0.1 + 0.01 for _ in range(2)]
    inputs = [torch.rand(EXPERTS, generator=g) + 0.3 for _ in range(2)]
    return w2, inputs


def situ64(g, u):
    return BETA * math.tanh(g / BETA) / (1 + math.exp(-g)) * LINEAR_BETA * math.tanh(u / LINEAR_BETA)


def test_situ_scale_is_a_copy_of_the_requantisation_scale(kernel):
    """At construction and after loading; registered, so that re-arrangement moves it."""
    w2, inputs = scales()
    experts, layer = make(MoEActivation.SITU, w2, inputs)
    torch.testing.assert_close(experts.g1_scale_c.data, 1.0 / inputs[1], rtol=0, atol=0)
    assert experts.g1_scale_c is layer.g1_scale_c
    assert experts.g1_scale_c.data_ptr() != experts.quant_config.a2_gscale.data_ptr()


def test_swiglu_folds_and_non_gated_does_not(kernel):
    w2, inputs = scales()
    experts, _ = make(MoEActivation.SILU, w2, inputs)
    torch.testing.assert_close(experts.g1_scale_c.data, w2[0] * inputs[0] / inputs[1])
    experts, _ = make(MoEActivation.RELU2_NO_MUL, w2, inputs)
    torch.testing.assert_close(experts.g1_scale_c.data, 1.0 / inputs[1])


@pytest.mark.parametrize("activation", [MoEActivation.SITU, MoEActivation.SILU])
def test_scalars_at_the_kernel_reproduce_float64(kernel, activation):
    """PUBLIC_CASES 24: one factor too many in the up half shows at once."""
    w2, inputs = scales()
    experts, _ = make(activation, w2, inputs)
    sent = call(experts, activation, kernel)
    for e in range(EXPERTS):
        codes_gate, codes_up = 40.0 + 3 * e, -75.0 + 7 * e
        gate, scalar = (sent[f"output1_scale_{n}"][e].double().item() for n in ("gate_scalar", "scalar"))
        true = [c * w2[0][e].double().item() * inputs[0][e].double().item() for c in (codes_gate, codes_up)]
        if activation == MoEActivation.SITU:
            got = situ64(codes_gate * gate, codes_up * gate) * scalar
            want = situ64(*true)
        else:
            got = codes_gate * gate / (1 + math.exp(-codes_gate * gate)) * codes_up * scalar
            want = true[0] / (1 + math.exp(-true[0])) * true[1]
        assert got == pytest.approx(want / inputs[1][e].double().item(), rel=1e-5)
        assert sent["output2_scale_scalar"][e].item() == pytest.approx(
            w2[1][e].item() * inputs[1][e].item(), rel=1e-6
        )


def test_doubling_the_tensor_scale_while_halving_the_codes_changes_nothing(kernel):
    """Block scales halve the accumulators; SiTU still sees the same values."""
    w2, inputs = scales()
    results = []
    for factor in (1.0, 2.0):
        experts, _ = make(MoEActivation.SITU, [w2[0] * factor, w2[1]], inputs)
        sent = call(experts, MoEActivation.SITU, kernel)
        gate, scalar = (sent[f"output1_scale_{n}"].double() for n in ("gate_scalar", "scalar"))
        codes = 50 / factor, 90 / factor
        results.append([situ64(*(c * g.item() for c in codes)) * s.item() for g, s in zip(gate, scalar)])
    assert results[0] == pytest.approx(results[1], rel=1e-6)


def test_situ_constants_arrive_per_expert_and_unscaled(kernel):
    """PUBLIC_CASES 27: beta 4 and linear beta 25, on dequantised values."""
    experts, layer = make(MoEActivation.SITU, *scales())
    sent = call(experts, MoEActivation.SITU, kernel)
    assert sent["gemm1_alpha"].tolist() == [BETA] * EXPERTS
    assert sent["gemm1_beta"].tolist() == [LINEAR_BETA] * EXPERTS
    assert sent["gemm1_clamp_limit"] is None


@pytest.mark.parametrize("activation", [MoEActivation.SITU, MoEActivation.SILU])
def test_rearranged_experts_equal_a_fresh_load(kernel, activation):
    """PUBLIC_CASES 33: vLLM's re-arrangement swaps experts 0 and 3 of what the layer has registered."""
    w2, inputs = [torch.tensor([1.0, 2.0, 4.0, 8.0]) / 64 for _ in range(2)], scales()[1]
    order = [3, 1, 2, 0]
    experts, layer = make(activation, w2, inputs)
    layer.local_num_experts = EXPERTS
    before = call(experts, activation, kernel)["output1_scale_scalar"].data.clone()
    rearrange([layer], order)
    moved = call(experts, activation, kernel)
    fresh, _ = make(activation, [s[order] for s in w2], [s[order] for s in inputs])
    loaded = call(fresh, activation, kernel)
    names = ["output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar"]
    for name in names + ["gemm1_alpha"] * (activation == MoEActivation.SITU):
        torch.testing.assert_close(moved[name].data, loaded[name].data, rtol=0, atol=0)
    assert (moved["output1_scale_scalar"] != before).tolist() == [True, False, False, True]


def on_blackwell():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (10, 0)


@pytest.mark.sm100
@pytest.mark.skipif(not on_blackwell(), reason="needs a GPU of compute capability 10.0")
@pytest.mark.parametrize("tokens", [1, 33])
@pytest.mark.parametrize("activation", ["situ", "silu"])
def test_layer_on_the_kernel_against_float64(one_rank, monkeypatch, activation, tokens):
    """PUBLIC_CASES 24, 25 and 27 end to end: loaded, shuffled and run as the engine does it.

    Tensor scales differ per expert and none is 1. Both GEMM inputs are rounded to NVFP4
    in the reference too. What remains is bfloat16, which now and then tips a code over:
    up to 5.6 % of the norm in the CPU emulation. A scale too many would be off by its factor.
    """
    from vllm.v1.worker.workspace import init_workspace_manager

    asked = MoEActivation(activation)
    if not trtllm.TrtLlmNvFp4ExpertsBase._supports_activation(asked):
        pytest.skip(f"the installed FlashInfer has no {activation} kernel")
    device = torch.device("cuda", 0)
    init_workspace_manager(device)
    # Routing is given here; the monolithic class would do its own.
    monkeypatch.setattr(trtllm.TrtLlmNvFp4ExpertsMonolithic, "_supports_parallel_config", lambda config: False)
    bank = Bank(8, 512, 256, scales=lambda e, s: 0.0015 * (e + 1) * (2 if s == "w2" else 1), input_scale=0.375)
    with device:
        layer = make_layer(
            one_rank, 8, 512, 256, quant=nvfp4(), backend="flashinfer_trtllm", dtype=torch.bfloat16,
            activation=activation,
        )  # fmt: skip
        load(layer, bank.file())
    assert isinstance(layer.quant_method.moe_kernel.fused_experts, trtllm.TrtLlmNvFp4ExpertsModular)
    weights, ids = routed(tokens, 8, 2)
    x = torch.randn(tokens, 512, generator=torch.Generator().manual_seed(3)).bfloat16()
    got = run(layer, x.to(device), weights.to(device), ids.to(device)).cpu()
    act = situ if activation == "situ" else lambda g, u: g / (1 + torch.exp(-g)) * u
    dense = [bank.dense(s) for s in ("w1", "w3", "w2")]
    want = reference(x, *dense, weights.bfloat16(), ids, act=act, rounding=(0.375, 0.375))
    assert (got.double() - want).norm() <= 0.1 * want.norm()
