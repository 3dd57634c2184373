# SPDX-License-Identifier: Apache-2.0
"""CPU experts of compressed-tensors files: NVFP4 with divisors, and MXFP4.

The references are those of ``test_cpu_experts``: float64, token by token.
"""

import math

import pytest
import torch

from tests.kernels.moe.test_cpu_experts import (
    PREFIX,
    Bank,
    assert_close,
    decode,
    load,
    make_layer,
    nvfp4,
    reference,
    routed,
    run,
)
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (  # noqa: E501
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="CPU kernels")

SHARDS = ("w1", "w3", "w2")


def group(**weights):
    return {"num_bits": 4, "type": "float", "symmetric": True, "dynamic": False, **weights}


def compressed_nvfp4(ignore=(), activations=True):
    weights = group(strategy="tensor_group", group_size=16)
    return CompressedTensorsConfig.from_config(
        {
            "format": "nvfp4-pack-quantized",
            "ignore": list(ignore),
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": weights,
                    "input_activations": {**weights, "dynamic": "local"} if activations else None,
                }
            },
        }
    )


def compressed_mxfp4():
    weights = group(strategy="group", group_size=32, scale_dtype="torch.uint8")
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return CompressedTensorsConfig.from_config({"format": "mixed-precision", "config_groups": groups})


# ---- NVFP4 -------------------------------------------------------------------


def divided(bank, input_scales=True, change=lambda name, value: value):
    """The bank as compressed-tensors stores it: reciprocal scales of shape [1]."""
    for name, value in bank.file(input_scales):
        base, _, last = name.rpartition(".")
        if last == "weight":
            last = "weight_packed"
        elif last in ("weight_scale_2", "input_scale"):
            last = {"weight_scale_2": "weight_global_scale", "input_scale": "input_global_scale"}[last]
            value = (1.0 / value).reshape(1)
        value = change(f"{base}.{last}", value)
        if value is not None:
            yield f"{base}.{last}", value


def load_compressed(config, bank, backend="auto", dtype=torch.float32, **kwargs):
    kwargs = {"quant": compressed_nvfp4(), "backend": backend, "dtype": dtype} | kwargs
    layer = make_layer(config, bank.experts, bank.hidden, bank.width, **kwargs)
    return load(layer, divided(bank))


def load_modelopt(config, bank, backend="auto", dtype=torch.float32):
    layer = make_layer(config, bank.experts, bank.hidden, bank.width, quant=nvfp4(), backend=backend, dtype=dtype)
    return load(layer, bank.file())


@pytest.mark.parametrize("backend", ["auto", "emulation"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_multiplier_and_divisor_give_equal_outputs(one_rank, backend, dtype):
    """PUBLIC_CASES 31: the same experts in both dialects, bit for bit."""
    bank = Bank(5, 64, 48, input_scale=0.5)
    weights, ids = routed(9, 5, 2)
    x = torch.randn(9, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    ours = run(load_compressed(one_rank, bank, backend, dtype), x, weights, ids)
    theirs = run(load_modelopt(one_rank, bank, backend, dtype), x, weights, ids)
    assert torch.equal(ours, theirs)
    dense = [bank.dense(s) for s in SHARDS]
    rounding = (0.5, 0.5) if backend == "emulation" else (None, None)
    if dtype == torch.float32:
        assert_close(ours, reference(x, *dense, weights, ids, rounding=rounding), 1e-5)


@pytest.mark.parametrize("ratio", [1.0, 4.0, 0.25, 1.25, 0.8])
def test_gate_and_up_keep_their_own_divisor(one_rank, ratio):
    """PUBLIC_CASES 29: the larger divisor is the smaller scale, and neither is dropped."""
    bank = Bank(3, 64, 32, scales=lambda e, s: 0.01 * (ratio if s == "w3" else 1) * (e + 1))
    weights, ids = routed(6, 3, 2)
    x = torch.randn(6, 64)
    got = run(load_compressed(one_rank, bank), x, weights, ids)
    w1, w3, w2 = (bank.dense(s) for s in SHARDS)
    assert_close(got, reference(x, w1, w3, w2, weights, ids))
    if ratio != 1:
        collapsed = [w / ratio for w in w3]  # up under gate's scale
        wrong = reference(x, w1, collapsed, w2, weights, ids)
        assert (got - wrong).abs().max() > 0.02 * wrong.abs().max()


DIVISORS = ["2.w2.input_global_scale", "2.w2.weight_global_scale", "1.w3.weight_global_scale"]
BAD = [(name, value) for name in DIVISORS for value in ("missing", 0.0, math.inf, math.nan)]
# A zero block scale is legal, and e4m3 has no infinity.
BAD += [("0.w1.weight_scale", value) for value in ("missing", math.nan)]


@pytest.mark.parametrize("backend", ["auto", "emulation"])
@pytest.mark.parametrize("tensor, value", BAD)
def test_bad_scales_are_named(one_rank, backend, tensor, value):
    """PUBLIC_CASES 30."""
    bank = Bank(3, 64, 32)
    layer = make_layer(one_rank, 3, 64, 32, quant=compressed_nvfp4(), backend=backend)

    def change(name, stored):
        if name != tensor:
            return stored
        return None if value == "missing" else torch.full_like(stored, value)

    with pytest.raises(ValueError, match=rf"{PREFIX}\.{tensor}: (missing|found)"):
        load(layer, divided(bank, change=change))


@pytest.mark.parametrize("activations", [True, False])
def test_a_file_without_input_scales_runs_weight_only(one_rank, activations):
    """PUBLIC_CASES 30: whether or not its config promises activations in NVFP4."""
    bank = Bank(2, 64, 32)
    quant = compressed_nvfp4(activations=activations)
    layer = load(make_layer(one_rank, 2, 64, 32, quant=quant), divided(bank, False))
    weights, ids = routed(4, 2, 1)
    x = torch.randn(4, 64)
    dense = [bank.dense(s) for s in SHARDS]
    assert_close(run(layer, x, weights, ids), reference(x, *dense, weights, ids))


def test_resident_bytes_are_the_files(one_rank):
    bank = Bank(8, 256, 128)
    assert resident(load_compressed(one_rank, bank)) <= 1.05 * bank.file_bytes()


def resident(layer):
    held = {id(p): p for p in layer.parameters()}
    return sum(p.numel() * p.element_size() for p in held.values())


@pytest.mark.parametrize("padded", [160, 192])
def test_tensor_parallel_ranks_add_up_with_padding(one_rank, padded):
    """PUBLIC_CASES 20: width 160 per rank, padded to 192 over poisoned memory."""
    bank = Bank(3, 64, 320)
    weights, ids = routed(6, 3, 2)
    x = torch.randn(6, 64)
    total = sum(run(r, x, weights, ids) for r in ranks(one_rank, bank, compressed_nvfp4(), padded, 160, divided(bank)))
    assert_close(total, reference(x, *(bank.dense(s) for s in SHARDS), weights, ids))


def ranks(config, bank, quant, padded, unpadded, file, size=2):
    tensors = list(file)
    for rank in range(size):
        layer = make_layer(config, bank.experts, bank.hidden, padded * size, quant=quant, tp_size=size)
        layer.moe_config.moe_parallel_config.tp_rank = rank
        layer.moe_config.intermediate_size_per_partition_unpadded = unpadded
        yield load(layer, tensors)


def test_expert_ranks_agree_on_the_input_scale(one_rank, monkeypatch):
    """PUBLIC_CASES 34: the remote rank's expert has the largest input scale, 8."""
    from vllm.model_executor.layers.fused_moe.oracle import nvfp4 as oracle

    class Group:
        device_group = "experts"

    def all_reduce(tensor, op, group):
        assert op == torch.distributed.ReduceOp.MAX and group == "experts"
        tensor.fill_(max(tensor.item(), 8.0))

    bank = Bank(2, 64, 32, input_scale=2.0)
    layer = make_layer(one_rank, 2, 64, 32, quant=compressed_nvfp4(), backend="emulation")
    layer.moe_config.moe_parallel_config.ep_size = 2
    monkeypatch.setattr(oracle, "get_ep_group", Group)
    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    load(layer, divided(bank))
    experts = layer.quant_method.moe_kernel.fused_experts
    assert (experts.a1_gscale.item(), experts.a2_gscale.item()) == (1 / 8, 1 / 8)


def test_ignored_experts_stay_unquantised(one_rank):
    """By the names that the checkpoint gives them, not by those of dense layers."""
    name = type(make_layer(one_rank, 2, 64, 32, quant=compressed_nvfp4([r"re:.*\.(gate|up|down)_proj$"])).quant_method)
    assert name.__name__ == "CompressedTensorsW4A4Nvfp4MoEMethod"
    ignored = make_layer(one_rank, 2, 64, 32, quant=compressed_nvfp4([r"re:.*\.experts\.\d+\.w[123]$"]))
    assert type(ignored.quant_method).__name__ == "UnquantizedFusedMoEMethod"
    with pytest.raises(ValueError, match="same quantization scheme"):
        make_layer(one_rank, 2, 64, 32, quant=compressed_nvfp4([r"re:.*\.experts\.\d+\.w2$"]))


# ---- MXFP4 -------------------------------------------------------------------


class MxBank:
    """MXFP4 experts as the native file holds them; exponents differ per block."""

    def __init__(self, experts, hidden, width, seed=0):
        gen = torch.Generator().manual_seed(seed)
        shapes = {"w1": (width, hidden), "w3": (width, hidden), "w2": (hidden, width)}
        self.hidden, self.width, self.experts = hidden, width, experts
        self.tensors = {
            (e, shard): (
                torch.randint(0, 256, (rows, columns // 2), generator=gen, dtype=torch.uint8),
                torch.randint(118, 124, (rows, columns // 32), generator=gen, dtype=torch.uint8),
            )
            for e in range(experts)
            for shard, (rows, columns) in shapes.items()
        }

    def dense(self, shard):
        out = []
        for e in range(self.experts):
            packed, scale = self.tensors[e, shard]
            values = decode(packed, torch.ones(packed.shape[0], packed.shape[1] // 8), 1.0)
            for block in range(scale.shape[1]):
                values[:, 32 * block : 32 * block + 32] *= 2.0 ** (scale[:, block, None].double() - 127)
            out.append(values)
        return out

    def file(self, packed_name="weight_packed", change=lambda name, value: value):
        for (e, shard), (packed, scale) in self.tensors.items():
            for name, value in ((packed_name, packed), ("weight_scale", scale)):
                value = change(f"{e}.{shard}.{name}", value)
                if value is not None:
                    yield f"{e}.{shard}.{name}", value

    def file_bytes(self):
        return sum(t.numel() for _, t in self.file())


QUANTS = {"native": Mxfp4Config, "mixed": compressed_mxfp4}


def mx_layer(config, bank, quant="native", **kwargs):
    layer = make_layer(config, bank.experts, bank.hidden, bank.width, quant=QUANTS[quant](), **kwargs)
    return load(layer, bank.file("weight"))


@pytest.mark.parametrize("quant", QUANTS)
@pytest.mark.parametrize("dtype,rel", [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_mxfp4_experts_equal_the_reference(one_rank, quant, dtype, rel):
    bank = MxBank(5, 96, 64)
    layer = mx_layer(one_rank, bank, quant, dtype=dtype)
    weights, ids = routed(13, 5, 2)
    ids[ids == 3] = 1  # expert 3 sees no token
    x = torch.randn(13, 96).to(dtype)
    assert_close(run(layer, x, weights, ids), reference(x, *(bank.dense(s) for s in SHARDS), weights, ids), rel)


def test_mxfp4_weights_are_bit_equal_in_every_dtype(one_rank):
    bank = MxBank(2, 64, 32)
    layer = mx_layer(one_rank, bank)
    experts = layer.quant_method.moe_kernel.fused_experts
    for dtype in (torch.float32, torch.bfloat16):
        w13 = experts.expert_w13(layer.w13_weight, 1, dtype)
        w2 = experts.expert_w2(layer.w2_weight, 1, dtype)
        assert torch.equal(w13.double(), torch.cat((bank.dense("w1")[1], bank.dense("w3")[1])))
        assert torch.equal(w2.double(), bank.dense("w2")[1])


def test_mxfp4_extreme_exponents(one_rank):
    """Code 0 is 2**-127, which is no zero; 254 is 2**127, which is no infinity."""
    bank = MxBank(1, 64, 32)
    for packed, scale in bank.tensors.values():
        packed.fill_(0x22)  # two times 1.0
        scale[:, 0], scale[1:, :] = 0, 254
    layer = mx_layer(one_rank, bank, top_k=1)
    got = layer.quant_method.moe_kernel.fused_experts.expert_w13(layer.w13_weight, 0, torch.float32)
    assert got[0, 0].item() == 2.0**-127 and got[1, 0].item() == 2.0**127


def test_mxfp4_scales_may_be_stored_as_e8m0(one_rank):
    """Read as bits, never by value."""
    bank = MxBank(2, 64, 32)
    layer = make_layer(one_rank, 2, 64, 32, quant=Mxfp4Config())
    view = lambda name, v: v.view(torch.float8_e8m0fnu) if name.endswith("scale") else v  # noqa: E731
    load(layer, bank.file("weight", view))
    assert torch.equal(layer.w13_weight_scale.data, mx_layer(one_rank, bank).w13_weight_scale.data)


def test_mxfp4_resident_bytes_are_the_files(one_rank):
    bank = MxBank(8, 256, 128)
    layer = mx_layer(one_rank, bank)
    assert resident(layer) <= 1.05 * bank.file_bytes()
    assert layer.w13_weight.dtype == layer.w2_weight_scale.dtype == torch.uint8


@pytest.mark.parametrize("padded", [160, 256])
def test_mxfp4_ranks_add_up_with_padding(one_rank, padded):
    """PUBLIC_CASES 20: width 160 per rank, padded to 256; what pads is zero."""
    bank = MxBank(3, 64, 320)
    weights, ids = routed(6, 3, 2)
    x = torch.randn(6, 64)
    parts = list(ranks(one_rank, bank, Mxfp4Config(), padded, 160, bank.file("weight")))
    total = sum(run(r, x, weights, ids) for r in parts)
    assert_close(total, reference(x, *(bank.dense(s) for s in SHARDS), weights, ids))
    w13 = parts[1].quant_method.moe_kernel.fused_experts.expert_w13(parts[1].w13_weight, 0, x.dtype)
    assert not w13.unflatten(0, (2, padded))[:, 160:].any()


@pytest.mark.parametrize("unpadded, width", [(48, 96), (48, 128)])
def test_mxfp4_block_shared_by_two_ranks_is_refused(one_rank, unpadded, width):
    """PUBLIC_CASES 19: expert width 96 at TP2 is 1.5 blocks per rank, padded or not."""
    with pytest.raises(ValueError, match="expert width 48 .*no multiple of the MXFP4"):
        list(ranks(one_rank, MxBank(2, 64, 96), Mxfp4Config(), width // 2, unpadded, MxBank(2, 64, 96).file("weight")))


@pytest.mark.parametrize("tensor", ["1.w2.weight_scale", "0.w1.weight_scale", "1.w3.weight_scale"])
@pytest.mark.parametrize("value", ["missing", 255])
def test_mxfp4_scales_that_are_missing_or_nan_are_named(one_rank, tensor, value):
    def change(name, stored):
        if name != tensor:
            return stored
        return None if value == "missing" else torch.full_like(stored, value)

    layer = make_layer(one_rank, 2, 64, 32, quant=Mxfp4Config())
    with pytest.raises(ValueError, match=rf"{PREFIX}\.{tensor}: missing or NaN"):
        load(layer, MxBank(2, 64, 32).file("weight", change))


@pytest.mark.parametrize("name, value", [("activation_situ_beta", None), ("activation_situ_linear_beta", -1.0)])
def test_bad_situ_constants_are_refused(one_rank, name, value):
    """PUBLIC_CASES 26, when the backend is chosen."""
    with pytest.raises(ValueError, match=rf"MXFP4 MoE .*{name} > 0, found {value}"):
        make_layer(one_rank, 2, 64, 32, quant=Mxfp4Config(), **{name: value})
