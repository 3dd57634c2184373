# SPDX-License-Identifier: Apache-2.0
"""ModelOpt linears on CPU: FP8_PB_WO, NVFP4, and what MIXED_PRECISION dispatches.

The references dequantise row by row in float64, from the file's tensors.
"""

import math

import pytest
import torch

from vllm.model_executor.layers import linear
from vllm.model_executor.layers.quantization import block_fp8_linear
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptFp8Config,
    ModelOptFp8PbWoLinearMethod,
    ModelOptMixedPrecisionConfig,
    ModelOptNvFp4Config,
    ModelOptNvFp4LinearMethod,
)
from vllm.model_executor.layers.quantization.utils.modelopt_names import (
    canonical_name,
    find_algo,
    is_excluded,
    map_patterns,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    get_and_maybe_dequant_weights,
)
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

pytestmark = [
    pytest.mark.skipif(not current_platform.is_cpu(), reason="CPU kernels"),
    pytest.mark.usefixtures("one_rank"),
]

PREFIX = "language_model.model.layers.3.self_attn"


# ---- block-scaled FP8: the file and the reference ------------------------------


class Tensor:
    """An FP8_PB_WO tensor with a different power-of-two scale in every block."""

    def __init__(self, rows, cols, seed=0):
        gen = torch.Generator().manual_seed(1000 * rows + cols + seed)
        codes = torch.randint(0, 126, (rows, cols), generator=gen)
        sign = torch.randint(0, 2, (rows, cols), generator=gen) * 128
        self.weight = (codes + sign).to(torch.uint8).view(torch.float8_e4m3fn)
        shape = (math.ceil(rows / 128), math.ceil(cols / 128))
        order = torch.randperm(shape[0] * shape[1], generator=gen)
        self.scale = 2.0 ** (-8.0 - (order % 12)).view(shape)

    def dense(self):
        out = self.weight.to(torch.float64)
        for r in range(out.shape[0]):
            for block, c in enumerate(range(0, out.shape[1], 128)):
                out[r, c : c + 128] *= self.scale[r // 128, block].item()
        return out

    def file(self, dialect="weight_scale"):
        scale = self.scale
        if dialect == "weight_scale":
            scale = scale[:, None, :, None]
        return {"weight": self.weight, dialect: scale}


def fp8():
    return ModelOptFp8Config("FP8_PB_WO", True, None, [])


@pytest.fixture
def as_rank(monkeypatch):
    """Make layers believe in a tensor-parallel group, without one."""

    def set_rank(rank, size):
        for module in ("layers.linear", "parameter"):
            path = f"vllm.model_executor.{module}.get_tensor_model_parallel_"
            monkeypatch.setattr(path + "rank", lambda: rank)
            monkeypatch.setattr(path + "world_size", lambda: size)

    return set_rank


def load(layer, tensors, shard=None):
    params = dict(layer.named_parameters())
    for name, value in tensors.items():
        args = (value,) if shard is None else (value, shard)
        params[name].weight_loader(params[name], *args)


def finish(layer):
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def check(layer, want, inputs=None):
    """The layer holds ``want`` [out, in] bit for bit, and multiplies by it."""
    got = get_and_maybe_dequant_weights(layer, torch.float32)
    assert got.shape == want.shape
    assert torch.equal(got.double(), want)
    x = torch.randn(3, want.shape[1], generator=torch.Generator().manual_seed(2))
    y = layer(x)
    y = y[0] if isinstance(y, tuple) else y
    exact = x.double() @ want.T
    assert y.shape == exact.shape and y.isfinite().all()
    assert (y - exact).abs().max() <= 2e-6 * exact.abs().max()


# ---- block-scaled FP8: whole layers -------------------------------------------


@pytest.mark.parametrize("rows,cols", [(256, 256), (96, 256), (576, 128), (4, 192), (130, 300)])
@pytest.mark.parametrize("cls", ["ReplicatedLinear", "ColumnParallelLinear", "RowParallelLinear"])
def test_layer_equals_the_dequantised_checkpoint(cls, rows, cols):
    t = Tensor(rows, cols)
    layer = getattr(linear, cls)(cols, rows, bias=False, quant_config=fp8(), prefix="m.o_proj")
    load(layer, t.file())
    check(finish(layer), t.dense())


def test_both_public_dialects_give_the_same_layer():
    """PUBLIC_CASES 1: rank-4 weight_scale and rank-2 weight_scale_inv."""
    t = Tensor(576, 256)
    layers = []
    for dialect in ("weight_scale", "weight_scale_inv"):
        layer = linear.ReplicatedLinear(256, 576, bias=False, quant_config=fp8(), prefix="m.kv_a")
        load(layer, t.file(dialect))
        check(finish(layer), t.dense())
        assert [n for n, _ in layer.named_parameters()] == ["weight", "weight_scale"]
        layers.append(layer)
    assert torch.equal(layers[0].weight_scale, layers[1].weight_scale)


@pytest.mark.parametrize("shape", [(4, 1, 2, 1), (1, 2), (5, 1, 3, 1), (5,), (5, 2, 2)])
def test_wrong_block_count_is_named(shape):
    """PUBLIC_CASES 1: layer, found and expected."""
    layer = linear.ColumnParallelLinear(256, 576, bias=False, quant_config=fp8(), prefix="m.kv_a")
    with pytest.raises(ValueError) as error:
        load(layer, {"weight_scale": torch.ones(shape)})
    text = str(error.value)
    assert "m.kv_a.weight_scale" in text and "5x2 blocks" in text and str(shape) in text


@pytest.mark.parametrize(
    "name,value",
    [
        ("weight", torch.zeros(576, 256, dtype=torch.bfloat16)),
        ("weight", torch.zeros(256, 576).to(torch.float8_e4m3fn)),
        ("weight_scale", torch.zeros(5, 2, dtype=torch.uint8)),
        ("weight_scale", torch.zeros(5, 2, dtype=torch.bfloat16)),
    ],
)
def test_values_are_never_converted_to_codes(name, value):
    """PUBLIC_CASES 5: no FP8 parameter is filled with BF16 values."""
    layer = linear.ColumnParallelLinear(256, 576, bias=False, quant_config=fp8(), prefix="m.kv_a")
    with pytest.raises(ValueError, match=rf"m\.kv_a\.{name}: expected .*found {value.dtype}"):
        load(layer, {name: value})


def test_codes_stored_as_bytes_are_read_as_bits():
    t = Tensor(256, 128)
    layer = linear.ColumnParallelLinear(128, 256, bias=False, quant_config=fp8(), prefix="m.o")
    load(layer, t.file() | {"weight": t.weight.view(torch.uint8)})
    check(finish(layer), t.dense())


def test_two_scales_for_one_weight_are_refused():
    t = Tensor(256, 128)
    layer = linear.ColumnParallelLinear(128, 256, bias=False, quant_config=fp8(), prefix="m.o")
    load(layer, t.file())
    with pytest.raises(ValueError, match="m.o: the checkpoint holds both weight_scale and"):
        load(layer, t.file("weight_scale_inv"))


@pytest.mark.parametrize("lost", ["weight", "weight_scale"])
def test_what_the_file_lacks_is_named(lost):
    parts = [Tensor(256, 128, s) for s in range(2)]
    layer = linear.MergedColumnParallelLinear(
        128, [256, 256], bias=False, quant_config=fp8(), prefix="m.gate_up_proj"
    )
    for shard, t in enumerate(parts):
        load(layer, {n: v for n, v in t.file().items() if (n, shard) != (lost, 1)}, shard)
    with pytest.raises(ValueError, match=rf"m\.gate_up_proj\.{lost} \(shard 1\): not in"):
        finish(layer)


def test_infinite_scale_is_refused():
    t = Tensor(256, 128)
    t.scale[1, 0] = math.inf
    layer = linear.ReplicatedLinear(128, 256, bias=False, quant_config=fp8(), prefix="m.o")
    load(layer, t.file())
    with pytest.raises(ValueError, match=r"m\.o\.weight_scale: holds NaN or infinity"):
        finish(layer)


def test_bias_is_added_after_the_padding_is_dropped():
    t = Tensor(96, 128)
    layer = linear.ReplicatedLinear(128, 96, bias=True, quant_config=fp8(), prefix="m.b")
    load(layer, t.file())
    layer.bias.data = torch.randn(96)
    finish(layer)
    x = torch.randn(5, 128)
    want = x.double() @ t.dense().T + layer.bias.double()
    torch.testing.assert_close(layer(x)[0].double(), want, rtol=1e-5, atol=1e-5)
    x3 = x.view(5, 1, 128)
    assert torch.equal(layer(x3)[0], layer(x)[0].view(5, 1, 96))


def test_bf16_activations():
    t = Tensor(96, 256)
    layer = linear.ReplicatedLinear(
        256, 96, bias=False, quant_config=fp8(), prefix="m.b", params_dtype=torch.bfloat16
    )
    load(layer, t.file())
    finish(layer)
    x = torch.randn(5, 256).bfloat16()
    want = x.double() @ t.dense().T
    y = layer(x)[0]
    assert y.dtype == torch.bfloat16
    assert (y - want).abs().max() <= 1e-2 * want.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_amx_hosts_run_upstreams_kernel_in_bf16(monkeypatch, dtype):
    """PUBLIC_CASES 2 on a host that has AMX; only the two compiled operations are stand-ins.

    In float32 that kernel would round to BF16, so plain torch runs there too.
    """
    calls = []

    def pack(weight):
        calls.append("pack")
        return weight.T.contiguous()

    def multiply(x, packed, scale, block, bias, out_dtype, is_packed):
        calls.append("multiply")
        assert (x.dtype, bias, out_dtype, is_packed) == (torch.bfloat16, None, torch.bfloat16, True)
        assert block == [128, 128] and tuple(packed.shape) == (256, 128) and tuple(scale.shape) == (1, 2)
        weight = packed.float() * scale.T.repeat_interleave(128, 0)
        return (x.float() @ weight).bfloat16()

    kernel = block_fp8_linear.CPUFp8BlockScaledMMKernel
    monkeypatch.setattr(kernel, "is_supported", classmethod(lambda cls, capability=None: (True, None)))
    monkeypatch.setattr(torch.ops._C, "convert_weight_packed", pack, raising=False)
    monkeypatch.setattr(torch.ops._C, "fp8_scaled_mm_cpu", multiply, raising=False)
    t = Tensor(96, 192)
    layer = linear.ReplicatedLinear(192, 96, bias=True, quant_config=fp8(), prefix="m.b", params_dtype=dtype)
    load(layer, t.file())
    layer.bias.data = torch.randn(96, dtype=dtype)
    finish(layer)
    x = torch.randn(5, 192).to(dtype)
    want = x.double() @ t.dense().T + layer.bias.double()
    bound = 1e-2 if dtype == torch.bfloat16 else 1e-5
    assert (layer(x)[0] - want).abs().max() <= bound * want.abs().max()
    assert calls == (["pack", "multiply"] if dtype == torch.bfloat16 else [])


class StubKernel:
    """Counts calls and packs as a real kernel may: transposed and scaled."""

    calls = 0

    def __init__(self, shape):
        self.shape = shape

    def process_weights_after_loading(self, layer):
        self.calls += 1
        assert tuple(layer.weight.shape) == self.shape
        assert not hasattr(layer, "weight_scale_inv")
        scale = layer.weight_scale.repeat_interleave(128, 0).repeat_interleave(128, 1)
        layer.weight = torch.nn.Parameter((layer.weight.float() * scale).T.contiguous())

    def apply_weights(self, layer, x, bias=None):
        assert bias is None
        return x @ layer.weight


@pytest.mark.parametrize("name", ["kv_b_proj", "o_proj"])
def test_kernel_packs_once_and_sees_whole_blocks(monkeypatch, name):
    """PUBLIC_CASES 2 and 36: hook called once; kv_b dequantises despite packing."""
    made = []

    def choose(shape, dtype, module_name):
        made.append(StubKernel(shape))
        return made[-1]

    monkeypatch.setattr(block_fp8_linear, "choose_block_fp8_kernel", choose)
    t = Tensor(4 * 72, 192)
    layer = linear.ColumnParallelLinear(
        192, 4 * 72, bias=False, quant_config=fp8(), prefix=f"{PREFIX}.{name}"
    )
    load(layer, t.file())
    finish(layer)
    assert [k.shape for k in made] == [(384, 256)] and made[0].calls == 1
    x = torch.randn(3, 192)
    want = x.double() @ t.dense().T
    assert (layer(x)[0] - want).abs().max() <= 2e-6 * want.abs().max()
    if name == "kv_b_proj":
        got = get_and_maybe_dequant_weights(layer, torch.float32)
        assert torch.equal(got.double(), t.dense())
    else:
        with pytest.raises(ValueError, match="o_proj: the weight was packed by StubKernel"):
            get_and_maybe_dequant_weights(layer, torch.float32)


# ---- block-scaled FP8: fused and sharded layers -----------------------------------


def merged(parts, cols, **kwargs):
    layer = linear.MergedColumnParallelLinear(
        cols, [p.weight.shape[0] for p in parts], bias=False, quant_config=fp8(),
        prefix=f"{PREFIX}.fused", **kwargs,
    )  # fmt: skip
    for shard, t in enumerate(parts):
        load(layer, t.file(), shard)
    return finish(layer)


def test_partial_block_at_the_end_of_a_fused_layer():
    """PUBLIC_CASES 14: q_a 256 rows and kv_a 192 rows, the last scale 8."""
    q_a, kv_a = Tensor(256, 128), Tensor(192, 128, 1)
    kv_a.scale[-1] = 8.0
    layer = merged([q_a, kv_a], 128, disable_tp=True)
    want = torch.cat((q_a.dense(), kv_a.dense()))
    check(layer, want)
    assert torch.equal(want[-64:], kv_a.weight[-64:].double() * 8)
    assert layer.weight_scale.shape[0] == 4 and layer.weight_scale.isfinite().all()


@pytest.mark.parametrize("rows", [[320, 320], [192, 192], [64, 64, 64, 64], [576, 256]])
def test_no_block_straddles_two_partitions(rows):
    """PUBLIC_CASES 17: up starts with its own scale row at 320 rows each."""
    parts = [Tensor(r, 256, seed) for seed, r in enumerate(rows)]
    check(merged(parts, 256), torch.cat([p.dense() for p in parts]))


@pytest.mark.parametrize("rank,size", [(0, 1), (0, 2), (1, 2), (2, 4)])
def test_one_tensor_with_scales_continuous_over_groups(as_rank, rank, size):
    """PUBLIC_CASES 18: 2×192 rows fused on disk with 3 scale rows."""
    t = Tensor(384, 128)
    as_rank(rank, size)
    layer = linear.MergedColumnParallelLinear(
        128, [192, 192], bias=False, quant_config=fp8(), prefix="m.gate_up_proj"
    )
    load(layer, t.file())
    dense, part = t.dense(), 192 // size
    want = [dense[g * 192 + rank * part :][:part] for g in (0, 1)]
    if size == 1:
        codes = t.weight[192:256].double()
        assert torch.equal(want[1][:64], codes * t.scale[1].item())
    check(finish(layer), torch.cat(want))


def kda(heads, head_dim, cols, rank, size, as_rank, pad=True):
    """q, k, v, g, f_a (replicated), b and the padding that the model adds."""
    import vllm.models.kimi_k3  # noqa: F401  (before the layer: they import each other)
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn

    as_rank(rank, size)
    wide = heads * head_dim
    parts = [Tensor(wide, cols, s) for s in range(4)]
    parts += [Tensor(head_dim, cols, 4), Tensor(heads, cols, 5)]
    local = 4 * wide // size + head_dim + heads // size
    padding = -local % 16 if pad else 0
    sizes = [p.weight.shape[0] for p in parts] + [padding * size] * bool(padding)
    layer = kimi_gdn_linear_attn._KimiGDNMergedColumnParallelLinear(
        cols, sizes, replicated_shard_id=4, tp_size=size, bias=False,
        quant_config=fp8(), prefix=f"{PREFIX}.in_proj_qkvgfab",
    )  # fmt: skip
    if padding:
        layer.weight.data[-padding:].zero_()
    for shard, t in enumerate(parts):
        load(layer, t.file(), shard)
    want = []
    for shard, t in enumerate(parts):
        rows = t.weight.shape[0] // (1 if shard == 4 else size)
        start = 0 if shard == 4 else rank * rows
        want.append(t.dense()[start : start + rows])
    want.append(torch.zeros(padding, cols, dtype=torch.float64))
    return finish(layer), torch.cat(want)


@pytest.mark.parametrize("rank,size", [(0, 1), (0, 2), (1, 2), (3, 4)])
def test_kda_projection(as_rank, rank, size):
    """PUBLIC_CASES 15 and 23: b has 4 rows and one scale row, read by each rank."""
    check(*kda(4, 128, 256, rank, size, as_rank))


@pytest.mark.parametrize(
    "heads,head_dim,size", [(8, 64, 8), (16, 64, 16), (24, 64, 3), (96, 64, 32), (192, 64, 2)]
)
def test_kda_projection_of_adversarial_shapes(as_rank, heads, head_dim, size):
    for rank in (1, size - 1):
        check(*kda(heads, head_dim, 128, rank, size, as_rank))


@pytest.mark.parametrize("size", [1, 2, 3])
def test_dense_mlp_of_an_odd_number_of_blocks(as_rank, size):
    """PUBLIC_CASES 16: width 33·128; TP2 cuts a block, and stays exact."""
    width, hidden = 33 * 128, 128
    gate, up, down = Tensor(width, hidden), Tensor(width, hidden, 1), Tensor(hidden, width)
    part = width // size
    total = 0
    x = torch.randn(2, hidden)
    for rank in range(size):
        as_rank(rank, size)
        mine = slice(rank * part, (rank + 1) * part)
        layer = merged([gate, up], hidden)
        check(layer, torch.cat((gate.dense()[mine], up.dense()[mine])))
        layer_down = linear.RowParallelLinear(
            width, hidden, bias=False, quant_config=fp8(), prefix="m.down_proj", reduce_results=False
        )
        load(layer_down, down.file())
        check(finish(layer_down), down.dense()[:, mine])
        g, u = layer(x)[0].chunk(2, -1)
        total = total + layer_down(g * u)[0]
    h = (x.double() @ gate.dense().T) * (x.double() @ up.dense().T)
    want = h @ down.dense().T
    assert (total - want).abs().max() <= 1e-5 * want.abs().max()


@pytest.mark.parametrize("rank", [0, 1, 2, 3])
def test_rows_and_columns_that_start_inside_a_block(as_rank, rank):
    """q_b at TP32 in small: 576 rows per rank; 64 columns per rank for o_proj."""
    as_rank(rank, 4)
    q_b = Tensor(4 * 576, 128)
    layer = linear.ColumnParallelLinear(128, 4 * 576, bias=False, quant_config=fp8(), prefix="m.q_b")
    load(layer, q_b.file())
    check(finish(layer), q_b.dense()[rank * 576 : (rank + 1) * 576])
    for cols in (64, 192):
        o = Tensor(96, 4 * cols)
        layer = linear.RowParallelLinear(
            4 * cols, 96, bias=False, quant_config=fp8(), prefix="m.o", reduce_results=False
        )
        load(layer, o.file())
        check(finish(layer), o.dense()[:, rank * cols : (rank + 1) * cols])


# ---- NVFP4 linears ----------------------------------------------------------------

LEVELS = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def nvfp4_tensor(rows, cols, tensor_scale, seed=0):
    gen = torch.Generator().manual_seed(seed)
    packed = torch.randint(0, 256, (rows, cols // 2), generator=gen, dtype=torch.uint8)
    block = (torch.rand(rows, cols // 16, generator=gen) * 4 + 0.1).to(torch.float8_e4m3fn)
    dense = torch.empty(rows, cols, dtype=torch.float64)
    for parity, nibble in ((0, packed % 16), (1, packed // 16)):
        dense[:, parity::2] = torch.tensor(LEVELS).double()[(nibble % 8).long()]
        dense[:, parity::2] *= 1 - 2 * (nibble // 8).double()
    for b in range(cols // 16):
        dense[:, 16 * b : 16 * b + 16] *= block[:, b : b + 1].double() * tensor_scale
    file = {
        "weight": packed,
        "weight_scale": block,
        "weight_scale_2": torch.tensor(tensor_scale),
        "input_scale": torch.tensor(1.0),
    }
    return file, dense


@pytest.mark.parametrize("algo", ["NVFP4", "W4A16_NVFP4"])
@pytest.mark.parametrize("scales", [(0.5, 0.5), (0.01, 0.0125), (0.25, 1.0)])
def test_nvfp4_linear_keeps_each_shards_tensor_scale(algo, scales):
    """PUBLIC_CASES 29, for fused linears: nothing is re-expressed or rounded."""
    config = ModelOptNvFp4Config(algo, True, None, [], 16)
    layer = linear.MergedColumnParallelLinear(
        64, [48, 32], bias=True, quant_config=config, prefix="m.gate_up_proj"
    )
    dense = []
    for shard, (rows, scale) in enumerate(zip((48, 32), scales)):
        file, want = nvfp4_tensor(rows, 64, scale, shard)
        load(layer, file, shard)
        dense.append(want)
    layer.bias.data = torch.randn(80)
    finish(layer)
    x = torch.randn(7, 64)
    want = x.double() @ torch.cat(dense).T + layer.bias.double()
    got = layer(x)[0]
    assert (got - want).abs().max() <= 2e-6 * want.abs().max()
    assert layer.weight.dtype == torch.uint8


@pytest.mark.parametrize("lost", ["weight_scale", "weight_scale_2"])
def test_nvfp4_linear_names_a_missing_scale(lost):
    layer = linear.ReplicatedLinear(
        64, 48, bias=False, quant_config=ModelOptNvFp4Config("NVFP4", True, None, [], 16),
        prefix="m.o_proj",
    )  # fmt: skip
    file, _ = nvfp4_tensor(48, 64, 0.5)
    del file[lost]
    file = {n: v.reshape(1) if v.dim() == 0 else v for n, v in file.items()}
    load(layer, file)
    with pytest.raises(ValueError, match=rf"m\.o_proj\.{lost}.*missing"):
        finish(layer)


# ---- names and dispatch --------------------------------------------------------------

PACKED = {
    "gate_up_proj": ["gate_proj", "up_proj"],
    "in_proj_qkvgfab": ["q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    "conv1d": ["q_conv1d", "k_conv1d", "v_conv1d"],
}
ROOTS = ["", "model.", "language_model.model."]


def mixed(layers, exclude=(), **extra):
    config = {
        "quant_method": "modelopt_mixed",
        "quant_algo": "MIXED_PRECISION",
        "group_size": 16,
        "quantized_layers": {n: {"quant_algo": a} for n, a in layers.items()},
        "exclude_modules": list(exclude),
    } | extra
    made = ModelOptMixedPrecisionConfig.from_config(config)
    made.packed_modules_mapping = PACKED
    return made


def attention(names, root="model."):
    return {f"{root}layers.3.self_attn.{n}": "FP8_PB_WO" for n in names}


@pytest.mark.parametrize("listed", ROOTS)
@pytest.mark.parametrize("asked", ROOTS)
def test_fused_names_are_found_under_any_root(listed, asked):
    """PUBLIC_CASES 7: same decision for all roots."""
    config = mixed(attention(PACKED["in_proj_qkvgfab"] + ["q_a_proj", "kv_a_proj_with_mqa"], listed))
    for name in ("in_proj_qkvgfab", "fused_qkv_a_proj", "q_proj"):
        layer = linear.ReplicatedLinear(
            128, 128, quant_config=config, prefix=f"{asked}layers.3.self_attn.{name}"
        )
        assert type(layer.quant_method) is ModelOptFp8PbWoLinearMethod
    layer = linear.ReplicatedLinear(
        128, 128, quant_config=config, prefix=f"{asked}layers.4.self_attn.q_proj"
    )
    assert isinstance(layer.quant_method, linear.UnquantizedLinearMethod)


@pytest.mark.parametrize(
    "key", ["block_sparse_moe.experts", "mlp.experts", "mlp.experts.7.w1", "block_sparse_moe.experts.0.w3"]
)
@pytest.mark.parametrize("root", ROOTS)
def test_experts_under_every_spelling(key, root):
    """PUBLIC_CASES 9: bank, alias and per-expert keys; mapping twice = once."""
    config = mixed({f"{root}layers.1.{key}": "NVFP4"})
    mapper = WeightsMapper(orig_to_new_prefix={"language_model.layers.": "language_model.model.layers."})
    for _ in range(2):
        name = "language_model.model.layers.1.block_sparse_moe.experts"
        assert config._resolve_quant_algo(name) == "NVFP4"
        assert config._resolve_quant_algo(name.replace("layers.1", "layers.2")) is None
        config.apply_vllm_mapper(mapper)
    assert canonical_name(canonical_name(name)) == canonical_name(name)


def test_part_of_a_fused_layer_is_refused():
    """PUBLIC_CASES 5: q, k, v and g are listed, b and f_a are not."""
    config = mixed(attention(["q_proj", "k_proj", "v_proj", "g_proj"]))
    with pytest.raises(ValueError, match=r"in_proj_qkvgfab.*not \['f_a_proj', 'b_proj'\]"):
        linear.ReplicatedLinear(128, 128, quant_config=config, prefix=f"{PREFIX}.in_proj_qkvgfab")


def test_shards_with_different_algorithms_are_refused():
    layers = attention(["q_a_proj"]) | {"model.layers.3.self_attn.kv_a_proj_with_mqa": "FP8"}
    with pytest.raises(ValueError, match="fused_qkv_a_proj: its shards.*different"):
        mixed(layers)._resolve_quant_algo(f"{PREFIX}.fused_qkv_a_proj")
    with pytest.raises(ValueError, match="same module"):
        mixed({"model.layers.1.mlp.experts": "NVFP4", "layers.1.block_sparse_moe.experts": "FP8"})


def test_unknown_algorithms_are_refused_by_name():
    """PUBLIC_CASES 3: FP8_PB is not FP8_PB_WO, and never becomes BF16."""
    layers = attention(["q_b_proj"]) | {"model.layers.3.self_attn.o_proj": "FP8_PB"}
    with pytest.raises(ValueError, match=r"layers\.3\.self_attn\.o_proj.*'FP8_PB'.*FP8_PB_WO"):
        mixed(layers)


def test_algorithms_that_only_linears_support(one_rank):
    """PUBLIC_CASES 10: FP8_PB_WO on experts, refused by name."""
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory

    name = "model.layers.1.block_sparse_moe.experts"
    with pytest.raises(ValueError, match=f"{name}: quant_algo 'FP8_PB_WO'.*bank of experts"):
        FusedMoEFactory(2, 1, 64, 32, quant_config=mixed({name: "FP8_PB_WO"}), prefix=name)


@pytest.mark.parametrize("place", ["exclude_modules", "ignore"])
def test_exclusions_are_read_from_either_key(place):
    layers = attention(["o_proj", "q_b_proj"])
    config = mixed(layers, **{place: ["*.self_attn.o_proj"]})
    kinds = [
        type(linear.ReplicatedLinear(128, 128, quant_config=config, prefix=f"{PREFIX}.{n}").quant_method)
        for n in ("o_proj", "q_b_proj")
    ]
    assert kinds == [linear.UnquantizedLinearMethod, ModelOptFp8PbWoLinearMethod]


def test_config_of_either_file_layout():
    """PUBLIC_CASES 4, the first three: nested and flat give the same config."""
    layers = {n: {"quant_algo": a} for n, a in attention(["o_proj"]).items()}
    inner = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": None, "group_size": 16}
    inner |= {"exclude_modules": ["*norm*"], "quantized_layers": layers}
    nested = ModelOptMixedPrecisionConfig.from_config({"quantization": inner})
    flat = ModelOptMixedPrecisionConfig.from_config(inner | {"quant_method": "modelopt_mixed"})
    assert nested.quantized_layers == flat.quantized_layers
    assert set(nested.exclude_modules) == set(flat.exclude_modules) == {"*norm*"}
    assert torch.float32 in flat.get_supported_act_dtypes()


@pytest.mark.parametrize("algo,blocked", [("FP8_PB_WO", True), ("FP8", False)])
def test_block_fp8_is_announced(algo, blocked):
    """What VllmConfig asks before it enables the fused activation quantiser."""
    assert mixed({"model.layers.3.self_attn.o_proj": algo}).has_blocked_weights() == blocked
    whole = ModelOptFp8Config.from_config({"quant_method": "modelopt", "quant_algo": algo})
    assert whole.has_blocked_weights() == blocked


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize(
    "pattern,hit,miss",
    [
        ("*.self_attn.q_proj", "layers.3.self_attn.q_proj", "layers.3.self_attn.q_proj_2"),
        ("*.block_sparse_moe.gate", "layers.1.mlp.gate", "layers.1.mlp.gate_up"),
        ("*.mlp.gate*", "layers.1.block_sparse_moe.gate_up", "layers.1.mlp.up"),
        ("model.layers.0.mlp*", "layers.0.mlp.down_proj", "layers.10.mlp.down_proj"),
        ("*shared_experts*", "layers.1.mlp.shared_experts.down_proj", "layers.1.mlp.experts"),
        ("lm_head", "lm_head", "lm_head_2"),
        ("layers.1", "layers.1.self_attn.o_proj", "layers.11.self_attn.o_proj"),
        (r"re:.*layers\.[12]\..*o_proj$", "layers.2.self_attn.o_proj", "layers.3.self_attn.o_proj"),
        (r"re:layers\.1\.", "layers.1.x", "layers.11.x"),
    ],
)
def test_exclusion_patterns(root, pattern, hit, miss):
    """PUBLIC_CASES 7 and 8: `*` at either end, `re:`, every root and spelling."""
    assert is_excluded(root + hit, [pattern], PACKED)
    assert not is_excluded(root + miss, [pattern], PACKED)


@pytest.mark.parametrize("root", ROOTS)
def test_exclusions_of_fused_layers(root):
    """PUBLIC_CASES 6: all three convolutions, or two of three."""
    name, patterns = f"{root}layers.0.self_attn.conv1d", ["*q_conv1d*", "*k_conv1d*", "*v_conv1d*"]
    assert is_excluded(name, patterns, PACKED)
    assert is_excluded(name, ["*conv1d"], PACKED)
    assert not is_excluded(name, ["*norm*"], PACKED)
    with pytest.raises(ValueError, match=r"conv1d: .*\['q_conv1d', 'k_conv1d'\] but not \['v_conv1d'\]"):
        is_excluded(name, patterns[:2], PACKED)


@pytest.mark.parametrize("pattern", ["a.b*", "*a.b", "*a.b*", r"re:^a\..*b$"])
def test_patterns_survive_a_rename(pattern):
    """PUBLIC_CASES 8 and 12: the decision is the same before and after the mapper."""
    mapper = WeightsMapper(orig_to_new_prefix={"a.": "model.a."})
    mapped = map_patterns(map_patterns([pattern], mapper._map_name), mapper._map_name)
    for name, want in (("a.b", True), ("a.c", False)):
        assert is_excluded(name, [pattern], {}) is want
        assert is_excluded("model." + name, mapped, {}) is want
    fc = WeightsMapper(orig_to_new_substr={".mlp.fc1.": ".fc1."})
    assert is_excluded("x.fc1", map_patterns(["x.mlp.fc1"], fc._map_name), {})


def test_a_models_own_fused_names_go_first():
    table = {"layers.0.a": "FP8", "layers.0.b": "FP8"}
    assert find_algo("model.layers.0.ab", table, {"ab": ["a", "b"]}) == "FP8"
    assert find_algo("model.layers.0.ab", table, {}) is None


def test_nvfp4_linear_in_a_mixed_checkpoint():
    config = mixed({"model.layers.3.self_attn.o_proj": "NVFP4"})
    layer = linear.ReplicatedLinear(64, 32, bias=False, quant_config=config, prefix=f"{PREFIX}.o_proj")
    assert type(layer.quant_method) is ModelOptNvFp4LinearMethod
