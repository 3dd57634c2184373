# SPDX-License-Identifier: Apache-2.0
"""CPU experts: unquantised, NVFP4 weight-only and NVFP4 W4A4 emulation.

The reference below is float64, loops over tokens, and decodes NVFP4 by itself.
"""

import math

import pytest
import torch

from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.experts import cpu_torch_moe
from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
from vllm.model_executor.layers.fused_moe.router.cpu_topk import topk_with_bias
from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="CPU kernels")

BETA, LINEAR_BETA = 4.0, 25.0
PREFIX = "language_model.model.layers.1.block_sparse_moe.experts"
LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
LEVELS += [-v for v in LEVELS]


# ---- the reference -----------------------------------------------------------


def decode(packed, block_scale, tensor_scale):
    """Decode one NVFP4 matrix to float64, code by code."""
    rows, half = packed.shape
    out = torch.empty(rows, 2 * half, dtype=torch.float64)
    for parity, codes in ((0, packed % 16), (1, packed // 16)):
        out[:, parity::2] = torch.tensor(LEVELS, dtype=torch.float64)[codes.long()]
    for block in range(block_scale.shape[1]):
        scale = block_scale[:, block].to(torch.float64) * float(tensor_scale)
        out[:, 16 * block : 16 * block + 16] *= scale[:, None]
    return out


def round_to_nvfp4(x, input_scale):
    """Round to NVFP4 and back, as ModelOpt does with a static input scale."""
    out = torch.empty_like(x, dtype=torch.float64)
    levels = torch.tensor(sorted({abs(v) for v in LEVELS}))
    for row in range(x.shape[0]):
        for start in range(0, x.shape[1], 16):
            block = x[row, start : start + 16].float()
            scale = (block.abs().max() / 6 / input_scale).to(torch.float8_e4m3fn)
            scale = scale.float() * input_scale
            if scale == 0:
                out[row, start : start + 16] = 0
                continue
            ratio = (block / scale).abs().clamp(max=6)
            # The nearest level; half-way cases go to the even code.
            distance = (ratio[:, None] - levels[None]).abs()
            near = distance.min(dim=1).values
            code = torch.empty(16, dtype=torch.long)
            for k in range(16):
                ties = (distance[k] == near[k]).nonzero().flatten().tolist()
                code[k] = next((t for t in ties if t % 2 == 0), ties[0])
            out[row, start : start + 16] = levels[code] * scale * block.sign()
    return out


def situ(gate, up, beta=BETA, linear_beta=LINEAR_BETA):
    out = beta * torch.tanh(gate / beta) / (1 + torch.exp(-gate))
    return out * (linear_beta * torch.tanh(up / linear_beta) if linear_beta else up)


def reference(x, w1, w3, w2, weights, ids, act=situ, rounding=(None, None)):
    """Σ p · w2 act(w1 x, w3 x), token by token."""
    y = torch.zeros(x.shape[0], w2[0].shape[0], dtype=torch.float64)
    for token in range(x.shape[0]):
        for weight, expert in zip(weights[token].tolist(), ids[token].tolist()):
            if expert < 0:
                continue
            z = x[token : token + 1].double()
            if rounding[0]:
                z = round_to_nvfp4(z, rounding[0])
            h = act(z @ w1[expert].double().T, z @ w3[expert].double().T)
            if rounding[1]:
                h = round_to_nvfp4(h, rounding[1])
            y[token] += weight * (h @ w2[expert].double().T)[0]
    return y


# ---- building layers ---------------------------------------------------------


def random_nvfp4(rows, cols, tensor_scale, gen):
    packed = torch.randint(0, 256, (rows, cols // 2), generator=gen, dtype=torch.uint8)
    block = torch.rand(rows, cols // 16, generator=gen) * 3 + 0.25
    return packed, block.to(torch.float8_e4m3fn), torch.tensor(tensor_scale)


class Bank:
    """Experts as a checkpoint holds them, with unequal scales."""

    def __init__(self, experts, hidden, width, seed=0, scales=None, input_scale=1.0):
        gen = torch.Generator().manual_seed(seed)
        shapes = {"w1": (width, hidden), "w3": (width, hidden), "w2": (hidden, width)}
        self.hidden, self.width, self.experts = hidden, width, experts
        self.input_scale = input_scale
        self.tensors = {}
        for e in range(experts):
            for i, (shard, shape) in enumerate(shapes.items()):
                scale = scales(e, shard) if scales else 2.0 ** (-7 - (e + i) % 3)
                self.tensors[e, shard] = random_nvfp4(*shape, scale, gen)

    def dense(self, shard):
        return [decode(*self.tensors[e, shard]) for e in range(self.experts)]

    def file(self, input_scales=True):
        for (e, shard), (packed, block, scale) in self.tensors.items():
            base = f"{e}.{shard}."
            yield base + "weight", packed
            yield base + "weight_scale", block
            yield base + "weight_scale_2", scale
            if input_scales:
                yield base + "input_scale", torch.tensor(self.input_scale)

    def file_bytes(self):
        return sum(t.numel() * t.element_size() for _, t in self.file())


def make_layer(config, experts, hidden, width, *, quant=None, backend="auto", **kwargs):
    before = config.kernel_config.moe_backend
    config.kernel_config.moe_backend = backend
    dtype, empty = torch.get_default_dtype(), torch.empty

    def poisoned(*args, **kwargs):
        return empty(*args, **kwargs).view(torch.uint8).fill_(0x7F).view(
            kwargs.get("dtype") or torch.get_default_dtype()
        )

    options = {
        "activation": "situ",
        "activation_situ_beta": BETA,
        "activation_situ_linear_beta": LINEAR_BETA,
        "top_k": 2,
        "prefix": PREFIX,
    } | kwargs
    try:
        torch.set_default_dtype(options.pop("dtype", dtype))
        torch.empty = poisoned  # what the file does not write must not pass unseen
        layer = FusedMoEFactory(
            num_experts=experts,
            hidden_size=hidden,
            intermediate_size=width,
            scoring_func="sigmoid",
            ckpt_names=("w1", "w2", "w3"),
            quant_config=quant,
            **options,
        ).routed_experts
    finally:
        torch.empty = empty
        torch.set_default_dtype(dtype)
        config.kernel_config.moe_backend = before
        config.compilation_config.static_forward_context.pop(options["prefix"], None)
    return layer


def nvfp4():
    return ModelOptNvFp4Config("NVFP4", True, None, [], 16)


def load(layer, weights):
    for _ in layer.load_weights(weights):
        pass
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def dense_layer(config, w1, w3, w2, dtype=torch.float32, **kwargs):
    experts, (width, hidden) = len(w1), w1[0].shape
    layer = make_layer(config, experts, hidden, width, dtype=dtype, **kwargs)
    names = {"w1": w1, "w3": w3, "w2": w2}
    return load(
        layer,
        (
            (f"{e}.{shard}.weight", w[e].to(dtype))
            for e in range(experts)
            for shard, w in names.items()
        ),
    )


def quant_layer(config, bank, dtype=torch.float32, **kwargs):
    layer = make_layer(
        config, bank.experts, bank.hidden, bank.width, quant=nvfp4(), dtype=dtype, **kwargs
    )
    return load(layer, bank.file())


def routed(tokens, experts, topk, seed=1):
    gen = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, experts, generator=gen)
    weights, ids = scores.topk(topk, dim=-1)
    return weights, ids.to(torch.int32)


def run(layer, x, weights, ids):
    return layer.forward_modular(x, weights, ids)


def assert_close(got, want, rel=2e-6):
    assert got.isfinite().all()
    error = (got.double() - want).abs().max()
    assert error <= rel * want.abs().max(), f"{error=} {want.abs().max()=}"


# ---- tests -------------------------------------------------------------------


@pytest.mark.parametrize("tokens", [1, 17])
@pytest.mark.parametrize("dtype,rel", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_unquantised_experts_equal_the_reference(one_rank, tokens, dtype, rel):
    gen = torch.Generator().manual_seed(3)
    shape = {"w1": (48, 64), "w3": (48, 64), "w2": (64, 48)}
    w = {n: [torch.randn(s, generator=gen) for _ in range(6)] for n, s in shape.items()}
    layer = dense_layer(one_rank, w["w1"], w["w3"], w["w2"], dtype)
    weights, ids = routed(tokens, 6, 2)
    x = torch.randn(tokens, 64, generator=gen).to(dtype)
    rounded = [[t.to(dtype) for t in w[n]] for n in ("w1", "w3", "w2")]
    assert_close(run(layer, x, weights, ids), reference(x, *rounded, weights, ids), rel)


def test_no_tokens(one_rank):
    layer = quant_layer(one_rank, Bank(2, 64, 32))
    weights, ids = routed(0, 2, 2)
    assert run(layer, torch.empty(0, 64), weights, ids).shape == (0, 64)


@pytest.mark.parametrize("quantised", [False, True])
def test_expert_map_drops_remote_experts(one_rank, quantised):
    """Experts 1 and 4 are local as 1 and 0; the rest contributes nothing."""
    bank = Bank(5, 64, 32)
    local = Bank(2, 64, 32)
    for here, there in ((0, 4), (1, 1)):
        for shard in ("w1", "w3", "w2"):
            local.tensors[here, shard] = bank.tensors[there, shard]
    if quantised:
        layer = quant_layer(one_rank, local)
    else:
        layer = dense_layer(one_rank, *(local.dense(s) for s in ("w1", "w3", "w2")))
    weights, ids = routed(9, 5, 3)
    ids[2] = -1
    layer._expert_map = torch.tensor([-1, 1, -1, -1, 0], dtype=torch.int32)
    x = torch.randn(9, 64)
    kept = torch.where((ids == 1) | (ids == 4), ids, -1)
    want = reference(x, *(bank.dense(s) for s in ("w1", "w3", "w2")), weights, kept)
    assert_close(run(layer, x, weights, ids), want)


def test_router_weight_on_input_is_applied_once(one_rank):
    bank = Bank(3, 64, 32)
    layer = quant_layer(one_rank, bank, top_k=1, apply_router_weight_on_input=True)
    weights, ids = routed(5, 3, 1)
    x = torch.randn(5, 64)
    dense = [bank.dense(s) for s in ("w1", "w3", "w2")]
    want = reference(x * weights, *dense, torch.ones_like(weights), ids)
    assert_close(run(layer, x, weights, ids), want)


def test_silu_experts_equal_the_reference(one_rank):
    bank = Bank(3, 64, 32)
    layer = quant_layer(one_rank, bank, activation="silu")
    weights, ids = routed(5, 3, 2)
    x = torch.randn(5, 64)
    dense = [bank.dense(s) for s in ("w1", "w3", "w2")]
    want = reference(
        x, *dense, weights, ids, act=lambda g, u: g / (1 + torch.exp(-g)) * u
    )
    assert_close(run(layer, x, weights, ids), want)


@pytest.mark.parametrize("dtype,rel", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_nvfp4_experts_equal_the_reference(one_rank, dtype, rel):
    bank = Bank(5, 96, 48, scales=lambda e, s: 0.003 * (e + 1) + 0.001 * (s == "w3"))
    layer = quant_layer(one_rank, bank, dtype)
    weights, ids = routed(13, 5, 2)
    ids[ids == 3] = 1  # expert 3 sees no token
    x = torch.randn(13, 96).to(dtype)
    dense = [bank.dense(s) for s in ("w1", "w3", "w2")]
    assert_close(run(layer, x, weights, ids), reference(x, *dense, weights, ids), rel)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nvfp4_experts_are_bit_equal_to_the_dequantised_checkpoint(one_rank, dtype):
    """With power-of-two tensor scales every factor is exact in float32."""
    bank = Bank(4, 64, 32)
    quantised = quant_layer(one_rank, bank, dtype)
    dense = dense_layer(one_rank, *(bank.dense(s) for s in ("w1", "w3", "w2")), dtype)
    weights, ids = routed(11, 4, 2)
    x = torch.randn(11, 64).to(dtype)
    assert torch.equal(run(quantised, x, weights, ids), run(dense, x, weights, ids))


def test_tensor_scale_and_block_scales_may_trade_a_factor(one_rank):
    """PUBLIC_CASES 24: 2**-6 tensor scale; doubled while block scales halve."""
    bank = Bank(1, 64, 32, scales=lambda e, s: 2.0**-6)
    moved = Bank(1, 64, 32, scales=lambda e, s: 2.0**-6)
    for key, (packed, block, scale) in bank.tensors.items():
        block = (block.float() / 2).to(torch.float8_e4m3fn)
        assert (block.float() * 2 == bank.tensors[key][1].float()).all()
        moved.tensors[key] = packed, block, scale * 2
    weights, ids = torch.ones(7, 1), torch.zeros(7, 1, dtype=torch.int32)
    x = torch.randn(7, 64)
    first = run(quant_layer(one_rank, bank, top_k=1), x, weights, ids)
    second = run(quant_layer(one_rank, moved, top_k=1), x, weights, ids)
    dense = [bank.dense(s) for s in ("w1", "w3", "w2")]
    assert_close(first, reference(x, *dense, weights, ids))
    assert torch.equal(first, second)


@pytest.mark.parametrize("ratio", [1.0, 4.0, 0.25, 1.25, 0.8])
def test_gate_and_up_keep_their_own_tensor_scale(one_rank, ratio):
    """PUBLIC_CASES 29 and 28: w1 and w3 differ in scale, and are not exchanged."""
    bank = Bank(3, 64, 32, scales=lambda e, s: 0.01 * (ratio if s == "w3" else 1))
    layer = quant_layer(one_rank, bank)
    weights, ids = routed(6, 3, 2)
    x = torch.randn(6, 64)
    w1, w3, w2 = (bank.dense(s) for s in ("w1", "w3", "w2"))
    got = run(layer, x, weights, ids)
    assert_close(got, reference(x, w1, w3, w2, weights, ids))
    exchanged = reference(x, w3, w1, w2, weights, ids)
    assert (got - exchanged).abs().max() > 0.1 * exchanged.abs().max()


@pytest.mark.parametrize("backend", ["unquantised", "auto", "emulation"])
def test_worked_value_and_constants_arrive(one_rank, backend, monkeypatch):
    """PUBLIC_CASES 25 and 27: gate 6, up 30 give 75.27, with beta 4 and 25."""
    seen = []

    def spy(gate_up, beta, linear_beta, upstream=cpu_torch_moe.situ_and_mul):
        seen.append((gate_up[0, 0].item(), gate_up[0, 16].item(), beta, linear_beta))
        return upstream(gate_up, beta, linear_beta)

    monkeypatch.setattr(cpu_torch_moe, "situ_and_mul", spy)
    bank = Bank(1, 16, 16, scales=lambda e, s: 1.0)
    # x = (6, 0, …); code 2 is 1.0; the up block has scale 5.
    first = torch.zeros(16, 8, dtype=torch.uint8)
    first[0, 0] = 2
    one, five = (torch.full((16, 1), v).to(torch.float8_e4m3fn) for v in (1.0, 5.0))
    bank.tensors[0, "w1"] = first, one, torch.tensor(1.0)
    bank.tensors[0, "w3"] = first, five, torch.tensor(1.0)
    bank.tensors[0, "w2"] = first, one, torch.tensor(1.0)
    if backend == "unquantised":
        layer = dense_layer(one_rank, *(bank.dense(s) for s in ("w1", "w3", "w2")), top_k=1)
    else:
        layer = quant_layer(one_rank, bank, backend=backend, top_k=1)
    x = torch.zeros(1, 16)
    x[0, 0] = 6.0
    got = run(layer, x, torch.ones(1, 1), torch.zeros(1, 1, dtype=torch.int32))[0, 0]
    assert seen == [(6.0, 30.0, BETA, LINEAR_BETA)]
    # 75.27 is rounded to 6 * 13 when activations are NVFP4; SwiGLU would give 179.55.
    assert got.item() == pytest.approx(78 if backend == "emulation" else 75.27, abs=0.01)


@pytest.mark.parametrize("backend", ["unquantised", "auto", "emulation"])
@pytest.mark.parametrize(
    "name,value",
    [
        ("activation_situ_beta", None),
        ("activation_situ_beta", 0.0),
        ("activation_situ_beta", -4.0),
        ("activation_situ_beta", math.nan),
        ("activation_situ_linear_beta", 0.0),
        ("activation_situ_linear_beta", -1.0),
    ],
)
def test_bad_situ_constants_are_refused(one_rank, backend, name, value):
    """PUBLIC_CASES 26: refused when the backend is chosen."""
    quant = None if backend == "unquantised" else nvfp4()
    asked = "auto" if backend == "unquantised" else backend
    with pytest.raises(ValueError, match=rf"{name} > 0, found {value}"):
        make_layer(one_rank, 2, 64, 32, quant=quant, backend=asked, **{name: value})


def test_situ_without_linear_beta_passes_up_through(one_rank):
    bank = Bank(2, 64, 32)
    layer = quant_layer(one_rank, bank, activation_situ_linear_beta=None)
    weights, ids = routed(4, 2, 1)
    x = torch.randn(4, 64)
    dense = [bank.dense(s) for s in ("w1", "w3", "w2")]
    want = reference(x, *dense, weights, ids, act=lambda g, u: situ(g, u, BETA, None))
    assert_close(run(layer, x, weights, ids), want)


def test_emulation_rounds_both_gemm_inputs(one_rank):
    """W4A4 on request: activations rounded to NVFP4 with the file's input scale."""
    bank = Bank(3, 64, 32, input_scale=0.5)
    layer = quant_layer(one_rank, bank, backend="emulation")
    weights, ids = routed(5, 3, 2)
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(5))
    dense = [bank.dense(s) for s in ("w1", "w3", "w2")]
    want = reference(x, *dense, weights, ids, rounding=(0.5, 0.5))
    assert_close(run(layer, x, weights, ids), want, rel=1e-5)
    plain = reference(x, *dense, weights, ids)
    assert (plain - want).abs().max() > 0.01 * want.abs().max()


def test_resident_bytes_are_the_files(one_rank):
    bank = Bank(8, 256, 128)
    layer = quant_layer(one_rank, bank)
    held = {id(p): p for p in layer.parameters()}
    resident = sum(p.numel() * p.element_size() for p in held.values())
    assert resident <= 1.05 * bank.file_bytes(), resident / bank.file_bytes()
    assert layer.w13_weight.dtype == torch.uint8 and layer.w2_weight.dtype == torch.uint8


def ranks(config, bank, tp_size, padded, unpadded):
    """Load the bank on every rank of an emulated tensor-parallel group."""
    for rank in range(tp_size):
        layer = make_layer(
            config, bank.experts, bank.hidden, padded * tp_size, quant=nvfp4(), tp_size=tp_size
        )
        layer.moe_config.moe_parallel_config.tp_rank = rank
        layer.moe_config.intermediate_size_per_partition_unpadded = unpadded
        yield load(layer, bank.file())


@pytest.mark.parametrize("padded", [160, 192])
def test_tensor_parallel_ranks_add_up(one_rank, padded):
    """PUBLIC_CASES 20: width 160 per rank, padded to 192 over poisoned memory."""
    bank = Bank(3, 64, 320)
    weights, ids = routed(6, 3, 2)
    x = torch.randn(6, 64)
    parts = [run(r, x, weights, ids) for r in ranks(one_rank, bank, 2, padded, 160)]
    dense = [bank.dense(s) for s in ("w1", "w3", "w2")]
    assert_close(sum(parts), reference(x, *dense, weights, ids))


def test_padding_adds_exactly_nothing(one_rank):
    bank = Bank(3, 64, 160)
    weights, ids = routed(6, 3, 2)
    x = torch.randn(6, 64)
    (padded,) = ranks(one_rank, bank, 1, 192, 160)
    gate_up = torch.nn.functional.linear(
        x, padded.quant_method.moe_kernel.fused_experts.expert_w13(padded.w13_weight, 0, x.dtype)
    )
    assert (gate_up[:, 160:192] == 0).all() and (gate_up[:, 352:] == 0).all()
    dense = [bank.dense(s) for s in ("w1", "w3", "w2")]
    assert_close(run(padded, x, weights, ids), reference(x, *dense, weights, ids))


@pytest.mark.parametrize("padded", [24, 48])
def test_a_block_shared_by_two_ranks_is_refused(one_rank, padded):
    """PUBLIC_CASES 19: expert width 48 at TP2 is 1.5 NVFP4 blocks per rank."""
    with pytest.raises(ValueError, match="expert width 24 .*no multiple of the NVFP4"):
        list(ranks(one_rank, Bank(2, 64, 48), 2, padded, 24))


def broken(bank, name, change):
    for tensor, value in bank.file():
        if tensor == name:
            if change == "missing":
                continue
            value = torch.full_like(value, change)
        yield tensor, value


@pytest.mark.parametrize("backend", ["auto", "emulation"])
@pytest.mark.parametrize("change", ["missing", 0.0, math.inf, math.nan])
@pytest.mark.parametrize(
    "tensor", ["2.w2.input_scale", "2.w2.weight_scale_2", "1.w3.weight_scale_2"]
)
def test_bad_tensor_scales_are_named(one_rank, backend, change, tensor):
    """PUBLIC_CASES 30."""
    bank = Bank(3, 64, 32)
    layer = make_layer(one_rank, 3, 64, 32, quant=nvfp4(), backend=backend)
    with pytest.raises(ValueError, match=rf"{PREFIX}\.{tensor}: (missing|found)"):
        load(layer, broken(bank, tensor, change))


@pytest.mark.parametrize("tensor", ["2.w2.weight_scale", "0.w1.weight_scale", "1.w3.weight_scale"])
def test_missing_block_scales_are_named(one_rank, tensor):
    bank = Bank(3, 64, 32)
    layer = make_layer(one_rank, 3, 64, 32, quant=nvfp4())
    with pytest.raises(ValueError, match=rf"{PREFIX}\.{tensor}: missing or NaN"):
        load(layer, broken(bank, tensor, "missing"))


def test_a_zero_block_scale_is_legal(one_rank):
    bank = Bank(2, 64, 32)
    bank.tensors[0, "w1"][1].view(torch.uint8)[:, 0] = 0
    layer = quant_layer(one_rank, bank)
    weights, ids = routed(4, 2, 1)
    x = torch.randn(4, 64)
    dense = [bank.dense(s) for s in ("w1", "w3", "w2")]
    assert_close(run(layer, x, weights, ids), reference(x, *dense, weights, ids))


def test_a_file_without_input_scales_runs_weight_only(one_rank):
    """PUBLIC_CASES 30: weight-only file; emulation asks for the input scales."""
    bank = Bank(2, 64, 32)
    layer = load(make_layer(one_rank, 2, 64, 32, quant=nvfp4()), bank.file(False))
    weights, ids = routed(4, 2, 1)
    x = torch.randn(4, 64)
    dense = [bank.dense(s) for s in ("w1", "w3", "w2")]
    assert_close(run(layer, x, weights, ids), reference(x, *dense, weights, ids))
    layer = make_layer(one_rank, 2, 64, 32, quant=nvfp4(), backend="emulation")
    with pytest.raises(ValueError, match="0.w1.input_scale: missing.*weight-only"):
        load(layer, bank.file(False))


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("renormalize", [False, True])
def test_routing_chooses_with_bias_and_weighs_without(scoring, renormalize):
    logits, bias = torch.randn(9, 8), torch.randn(8)
    weights, ids = topk_with_bias(logits, bias, 3, scoring, renormalize, 2.5)
    for token in range(9):
        row = logits[token].double()
        score = 1 / (1 + torch.exp(-row)) if scoring == "sigmoid" else row.exp() / row.exp().sum()
        best = sorted(range(8), key=lambda e: -(score[e] + bias[e]))[:3]
        assert ids[token].tolist() == best
        want = score[best] / (score[best].sum() if renormalize else 1) * 2.5
        torch.testing.assert_close(weights[token].double(), want, rtol=1e-6, atol=0)
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert MoEActivation.SITU.is_gated
