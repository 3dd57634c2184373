# SPDX-License-Identifier: Apache-2.0
"""One layer at a time at Kimi K3's real widths, per kernel that can be chosen, against float64.

On a Hopper card every backend that runs there; on CPU the one it has, at the narrowest
widths. What a kernel does to activations decides the bound: BF16 rounding of the result,
or e4m3 with a scale per 128 columns.
"""

import functools

import pytest
import torch

from tests.kernels.moe.test_cpu_compressed_experts import MxBank
from tests.kernels.moe.test_cpu_experts import BETA, LINEAR_BETA, Bank, make_layer, nvfp4
from tests.kernels.moe.test_cpu_experts import load as load_experts
from tests.kernels.quantization.few_tokens_oracle import e4m3
from tests.quantization.test_modelopt import PREFIX, as_rank, fp8, load  # noqa: F401
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config
from vllm.platforms import current_platform
from vllm.v1.worker.workspace import init_workspace_manager, is_workspace_manager_initialized

CPU = current_platform.is_cpu()
DEVICE = "cpu" if CPU else "cuda"
SIZES = [32] if CPU else [1, 2, 4, 8, 16, 32]
WIDTHS = [384] if CPU else [3072, 1536, 768, 384]
TOKENS = [1, 3] if CPU else [1, 17, 64, 65, 300]
BF16_RESULT = 2.0**-8  # a result rounded to BF16 is off by 2**-9 at most
E4M3_INPUT = 0.04  # 2**-4 at most for each input, about 0.026 in the mean


@pytest.fixture(autouse=True)
def device(one_rank):
    if not CPU and not current_platform.is_device_capability(90):
        pytest.skip("needs an NVIDIA GPU of compute capability 9.0")
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    torch.manual_seed(0)
    if not CPU and not is_workspace_manager_initialized():
        init_workspace_manager(torch.device(DEVICE))
    with torch.device(DEVICE):
        yield
    torch.set_default_dtype(before)


def relative(y, want):
    return ((y.double() - want).norm() / want.norm()).item()


# ---- FP8_PB_WO linears ----------------------------------------------------------


@pytest.fixture(params=["auto"] if CPU else ["auto", "cutlass", "triton"])
def linear_backend(request, one_rank):
    one_rank.kernel_config.linear_backend = request.param
    yield request.param
    one_rank.kernel_config.linear_backend = "auto"


@functools.cache
def file(rows, cols, seed=0):
    """Codes and scales as a file holds them, and the weight in float64 on the device."""
    with torch.device("cpu"):
        gen = torch.Generator().manual_seed(rows + cols + seed)
        codes = torch.randint(0, 126, (rows, cols), generator=gen, dtype=torch.uint8)
        codes += 128 * torch.randint(0, 2, codes.shape, generator=gen, dtype=torch.uint8)
        blocks = -(-rows // 128), -(-cols // 128)
        exponent = torch.randperm(blocks[0] * blocks[1], generator=gen).view(blocks) % 12
        scale = torch.ldexp(torch.ones(blocks, dtype=torch.float32), -8 - exponent)
        table = torch.tensor([e4m3(code) for code in range(256)], dtype=torch.float64)
    tensors = {"weight": codes.view(torch.float8_e4m3fn), "weight_scale": scale[:, None, :, None]}
    dense = table.to(DEVICE)[codes.to(DEVICE).int()]
    wide = scale.to(DEVICE).double().repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :cols]
    return tensors, dense.mul_(wide)


def check(layer, want, backend, record_property):
    layer.quant_method.process_weights_after_loading(layer)
    kernel = type(layer.quant_method.kernel).__name__
    for tokens in TOKENS:
        x = torch.randn(tokens, want.shape[1], dtype=torch.float32).to(torch.bfloat16)
        y = layer(x)[0]
        assert y.shape == (tokens, want.shape[0]) and y.dtype == torch.bfloat16 and y.isfinite().all()
        assert not y[:, ~want.any(1)].any()
        error = relative(y, x.double() @ want.T)
        record_property(f"{kernel} {tokens}", error)
        widened = CPU or (backend == "auto" and tokens <= 64)
        assert error < (BF16_RESULT if widened else E4M3_INPUT), (kernel, tokens, error)


@pytest.mark.parametrize("size", SIZES)
def test_kda_in_proj(as_rank, size, linear_backend, record_property):  # noqa: F811
    """q, k, v, g, f_a from rank 0, b, and rows that only widen the output; the last rank's."""
    import vllm.models.kimi_k3  # noqa: F401  (before the layer: they import each other)
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn

    cols = 384 if CPU else 7168
    as_rank(size - 1, size)
    rows = [12288] * 4 + [128, 96]
    padding = -(4 * 12288 // size + 128 + 96 // size) % 16
    layer = kimi_gdn_linear_attn._KimiGDNMergedColumnParallelLinear(
        cols, rows + [padding * size] * bool(padding), replicated_shard_id=4, tp_size=size, bias=False,
        quant_config=fp8(), prefix=f"{PREFIX}.in_proj_qkvgfab",
    )  # fmt: skip
    if padding:
        layer.weight.data[-padding:].zero_()
    want = []
    for shard, count in enumerate(rows):
        tensors, dense = file(count, cols, shard)
        load(layer, tensors, shard)
        part = count if shard == 4 else count // size
        want.append(dense[count - part :])
    layer.output_is_split = True
    check(layer, torch.cat([*want, want[0].new_zeros(padding, cols)]), linear_backend, record_property)


def one(cls, rows, cols, name):
    layer = getattr(linear, cls)(cols, rows, bias=False, quant_config=fp8(), prefix=f"{PREFIX}.{name}")
    tensors, dense = file(rows, cols)
    load(layer, tensors)
    return layer, dense


COLUMN_PARALLEL = {"q_b_proj": (18432, 1536), "f_b_proj": (12288, 128), "kv_b_proj": (24576, 512)}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", COLUMN_PARALLEL)
def test_column_parallel(as_rank, size, name, linear_backend, record_property):  # noqa: F811
    as_rank(size - 1, size)
    layer, dense = one("ColumnParallelLinear", *COLUMN_PARALLEL[name], name)
    check(layer, dense[-(len(dense) // size) :], linear_backend, record_property)


@pytest.mark.parametrize("size", SIZES)
def test_o_proj(as_rank, size, linear_backend, record_property, monkeypatch):  # noqa: F811
    as_rank(size - 1, size)
    monkeypatch.setattr(linear, "tensor_model_parallel_all_reduce", lambda y: y)
    layer, dense = one("RowParallelLinear", 7168, 12288, "o_proj")
    check(layer, dense[:, -(12288 // size) :], linear_backend, record_property)


def test_mla_qkv_a(linear_backend, record_property):
    cols, rows = 384 if CPU else 7168, (1536, 576)
    layer = linear.MergedColumnParallelLinear(
        cols, list(rows), bias=False, quant_config=fp8(), prefix=f"{PREFIX}.fused_qkv_a_proj", disable_tp=True
    )
    for shard, count in enumerate(rows):
        load(layer, file(count, cols, shard)[0], shard)
    layer.output_is_split = True
    check(layer, torch.cat([file(count, cols, i)[1] for i, count in enumerate(rows)]), linear_backend, record_property)


# ---- experts ---------------------------------------------------------------------


def situ(gate, up):
    out = BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate)
    return out * LINEAR_BETA * torch.tanh(up / LINEAR_BETA)


def check_experts(layer, bank, record_property):
    with torch.device("cpu"):
        dense = {shard: bank.dense(shard) for shard in ("w1", "w3", "w2")}
    dense = {shard: [w.to(DEVICE) for w in matrices] for shard, matrices in dense.items()}
    kernel = type(layer.quant_method.moe_kernel.fused_experts).__name__
    for tokens in TOKENS:
        x = torch.randn(tokens, bank.hidden, dtype=torch.float32).to(torch.bfloat16)
        weights, ids = torch.rand(tokens, bank.experts, dtype=torch.float32).topk(2)
        y = layer.forward_modular(x, weights, ids.int())
        want = torch.zeros(tokens, bank.hidden, dtype=torch.float64)
        for expert in range(bank.experts):
            share = (weights.double() * (ids == expert)).sum(1, keepdim=True)
            h = situ(x.double() @ dense["w1"][expert].T, x.double() @ dense["w3"][expert].T)
            want += share * (h @ dense["w2"][expert].T)
        error = relative(y, want)
        record_property(f"{kernel} {tokens}", error)
        assert error < 1.5 * BF16_RESULT, (kernel, tokens, error)  # the activation is rounded as well


def sized_scale(width, hidden):
    """Tensor scales that differ by expert, for results near 1; gate's and up's agree by powers of two."""
    return lambda expert, shard: 2.0 ** -(8 + expert % 3 + (shard == "w3"))


@pytest.mark.parametrize("backend", ["auto"] if CPU else ["auto", "marlin"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nvfp4_experts(one_rank, width, backend, record_property):
    with torch.device("cpu"):
        bank = Bank(4, 3584, width, scales=sized_scale(width, 3584))
    layer = make_layer(one_rank, 4, 3584, width, quant=nvfp4(), dtype=torch.bfloat16, backend=backend)
    check_experts(load_experts(layer, bank.file()), bank, record_property)
    if not CPU:
        assert layer.quant_method.nvfp4_backend.value == ("SITU_SM90" if backend == "auto" else "MARLIN")


@pytest.mark.parametrize("backend", ["auto"] if CPU else ["auto", "marlin"])
@pytest.mark.parametrize("width", WIDTHS)
def test_mxfp4_experts(one_rank, width, backend, record_property):
    with torch.device("cpu"):
        bank = MxBank(4, 3584, width)
    layer = make_layer(one_rank, 4, 3584, width, quant=Mxfp4Config(), dtype=torch.bfloat16, backend=backend)
    check_experts(load_experts(layer, bank.file("weight")), bank, record_property)
    if not CPU:
        assert layer.quant_method.mxfp4_backend.value == ("SITU_SM90" if backend == "auto" else "MARLIN")
