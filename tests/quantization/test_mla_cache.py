# SPDX-License-Identifier: Apache-2.0
"""MLA beside its weights: the scales of a quantised cache, and what kv_b is given when it is read."""

from types import MethodType, SimpleNamespace

import pytest
import torch

from tests.quantization import exactness
from tests.quantization.exactness import ATTENTION, Shape, fp8_tensor, make_attention
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.linear import ColumnParallelLinear
from vllm.model_executor.layers.quantization import modelopt
from vllm.models.kimi_k3.nvidia import mla as k3_mla
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the layers of the CPU platform")

MLA = [name for name, (kind, *_) in ATTENTION.items() if kind == "mla"]
SHAPE = Shape(heads=4, q_lora=256)


# ---- the cache's scales ---------------------------------------------------------------


@pytest.fixture
def tp(one_rank):
    with exactness.release() as state:
        yield state


def make(cls, monkeypatch, cache_algo):
    """An attention layer of a mixed-precision checkpoint, in its model, and the part of it that owns the cache."""
    config = exactness.quant_config

    def with_cache(*args):
        made = config(*args)
        made.kv_cache_quant_method = cache_algo
        return made

    monkeypatch.setattr(exactness, "quant_config", with_cache)
    attention = make_attention(cls, SHAPE) if cls in MLA else make_attention(cls, Shape(heads=4))
    if cls not in MLA:
        return attention, None
    assert attention.module is not None, "the constructor did not come to its end"
    exactness._attach(attention.model, attention.prefix, attention.module)
    wrapper = getattr(attention.module, "mla_attn", None)
    return attention, attention.module if wrapper is None else wrapper.mla_attn


def load(attention, scales, seed=0):
    sizes = SHAPE.tensors()["mla"]
    weights = {f"{n}.{k}": v for n, size in sizes.items() for k, v in fp8_tensor(*size, seed).file().items()}
    attention.model.load_weights((f"{attention.prefix}.{n}", t) for n, t in (weights | scales).items())


@pytest.mark.parametrize("names", [("k_proj.k_scale", "v_proj.v_scale"), ("k_scale", "v_scale"), ("attn.k_scale",), ()])
@pytest.mark.parametrize("cls", MLA)
def test_stored_scales_arrive_and_absent_ones_are_one(tp, monkeypatch, cls, names):
    """PUBLIC_CASES 37: 0.5 where an exporter may put it; one scale serves for both; without any, 1."""
    attention, cache = make(cls, monkeypatch, "FP8")
    load(attention, {name: torch.tensor(0.5) for name in names})
    for layer in attention.linears.values():
        layer.quant_method.process_weights_after_loading(layer)
    cache.kv_cache_dtype = "fp8"  # this host has no kernel for it
    for name in "qkv":
        getattr(cache, f"_{name}_scale").fill_(torch.nan)
    cache.quant_method.process_weights_after_loading(cache)
    cache.process_weights_after_loading(torch.bfloat16)
    want = 0.5 if names else 1.0
    assert cache._k_scale.item() == cache._v_scale.item() == want
    assert cache._k_scale_float == cache._v_scale_float == cache._k_scale_cpu.item() == want
    if hasattr(cache, "_k_scale_inv"):
        assert cache._k_scale_inv.item() == 1 / want


@pytest.mark.parametrize("cls", MLA)
def test_a_cache_that_is_not_quantised_has_scale_one(tp, monkeypatch, cls):
    """PUBLIC_CASES 37, for the published file: `kv_cache_quant_algo` is null."""
    attention, cache = make(cls, monkeypatch, None)
    load(attention, {})
    for layer in attention.linears.values():
        layer.quant_method.process_weights_after_loading(layer)
    cache.process_weights_after_loading(torch.bfloat16)
    assert not hasattr(cache, "k_scale") and cache._k_scale.item() == cache._k_scale_float == 1.0


@pytest.mark.parametrize("name", ["k_proj.k_scale", "v_scale"])
@pytest.mark.parametrize("cls,algo", [*((cls, None) for cls in MLA), ("KimiGatedDeltaNetAttention", "FP8")])
def test_a_scale_that_no_layer_takes_is_refused(tp, monkeypatch, cls, algo, name):
    """PUBLIC_CASES 37: the cache would be read as if the scale were 1."""
    attention, _ = make(cls, monkeypatch, algo)
    with pytest.raises(ValueError, match=rf"{attention.prefix}\.{name}: .*kv_cache_quant_algo"):
        attention.model.load_weights([(f"{attention.prefix}.{name}", torch.tensor(0.5))])


# ---- absorption ------------------------------------------------------------------------


@pytest.mark.parametrize("size,rank", [(1, 0), (2, 0), (2, 1)])
@pytest.mark.parametrize("cls", MLA)
def test_absorbed_halves_equal_the_dequantised_file(tp, monkeypatch, cls, size, rank):
    """PUBLIC_CASES 36: 4 heads of 256 rows, each block with its own scale; then other weights, in place."""
    from vllm.model_executor.model_loader import reload

    tp.rank, tp.size = rank, size
    attention, cache = make(cls, monkeypatch, None)
    reload.record_metadata_for_reloading(attention.model)
    rows, latent = SHAPE.tensors()["mla"]["kv_b_proj"]
    memory = None
    for seed in (0, 1):
        if memory is not None:
            reload.initialize_layerwise_reload(attention.model)
        load(attention, {}, seed)
        if memory is None:
            for layer in attention.linears.values():
                layer.quant_method.process_weights_after_loading(layer)
            cache.process_weights_after_loading(torch.bfloat16)
            memory = cache.W_UV.data_ptr(), cache.W_UK_T.data_ptr()
        else:
            reload.finalize_layerwise_reload(attention.model, SimpleNamespace(dtype=torch.bfloat16))
            assert memory == (cache.W_UV.data_ptr(), cache.W_UK_T.data_ptr())
        dense = fp8_tensor(rows, latent, seed).dense.bfloat16().view(4, 256, latent)
        heads = dense[rank * 4 // size : (rank + 1) * 4 // size]
        assert torch.equal(cache.W_UK_T, heads[:, :128])  # [head, no-rope, latent]
        assert torch.equal(cache.W_UV, heads[:, 128:].transpose(1, 2))  # [head, latent, value]


# ---- what kv_b is given -----------------------------------------------------------------

LATENT, ROPE, HEADS, NOPE, VALUE, TOKENS = 256, 64, 2, 128, 128, 6
FP8 = torch.float8_e4m3fn
ROWS = HEADS * (NOPE + VALUE)


class PerTensorKernel:
    """Stands in for a W8A8 GEMM, which this host lacks: quantises its input unless that is FP8 already."""

    def __init__(self, *_, **__):
        pass

    def process_weights_after_loading(self, layer):
        pass

    def input_quant_key(self):
        return None

    def apply_weights(self, layer, x, bias=None):
        weight = layer.weight.float() if layer.weight.shape[0] == ROWS else layer.weight.float().T
        return (x.to(FP8).float() @ (weight * layer.weight_scale.max()).T).bfloat16()


def plain_fp8(dense):
    return {"weight": (dense * 4).to(FP8), "weight_scale": torch.tensor(0.25), "input_scale": torch.tensor(1.0)}


def blocks(dense, dialect):
    """Codes of `dense` under block scales 2, 4, 8, …, which lose nothing of values on e4m3's grid."""
    rows, columns = dense.shape
    exponent = torch.arange(-(-rows // 128))[:, None] + torch.arange(-(-columns // 128))
    scale = torch.ldexp(torch.ones(exponent.shape), exponent - 1)
    codes = (dense / scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[:rows, :columns]).to(FP8)
    return {"weight": codes, "weight_scale": scale if dialect == "compressed-tensors" else scale[:, None, :, None]}


# Method → (quantisation config, file of a dense weight, whether it takes FP8 input as it is).
METHODS = {
    "BF16": (lambda: None, lambda dense: {"weight": dense.bfloat16()}, False),
    "FP8_PB_WO": (lambda: exactness.quant_config(algo="FP8_PB_WO"), lambda d: blocks(d, "modelopt"), False),
    "block FP8, compressed-tensors": (
        lambda: exactness.quant_config(algo="compressed-tensors"), lambda d: blocks(d, "compressed-tensors"), False,
    ),
    "FP8": (lambda: modelopt.ModelOptFp8Config("FP8", True, None, []), plain_fp8, True),
}  # fmt: skip


@pytest.fixture
def kv_b(one_rank, monkeypatch):
    def build(method):
        quant, file, _ = METHODS[method]
        dense = torch.randint(-8, 9, (ROWS, LATENT), generator=torch.Generator().manual_seed(1)) / 64
        if method == "FP8":
            monkeypatch.setattr(modelopt, "init_fp8_linear_kernel", PerTensorKernel)
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.bfloat16)
        try:
            with exactness._configured(None, None):
                layer = ColumnParallelLinear(
                    LATENT, ROWS, bias=False, quant_config=quant(), prefix="model.layers.2.self_attn.kv_b_proj"
                )
        finally:
            torch.set_default_dtype(before)
        for name, value in file(dense).items():
            param = getattr(layer, name)
            param.weight_loader(param, value)
        layer.quant_method.process_weights_after_loading(layer)
        return layer, dense

    return build


def context(layer, latents, cache_dtype, fp8_prefill, dcp, monkeypatch):
    """What a chunk's gather leaves in the workspace, and a prefill backend that keeps k and v."""
    mine = latents[:: 2 if dcp > 1 else 1]  # token t of the context lies on rank t mod 2
    width = LATENT + ROPE
    stored = FP8 if fp8_prefill and dcp == 1 else torch.bfloat16
    workspace = torch.full((8 * (dcp + 1) if dcp > 1 else 8, width), torch.nan).to(stored)

    def gather(src_cache, dst, **_):
        dst[: len(mine)].copy_(mine.to(dst.dtype))

    def exchange(everything, local):
        assert torch.equal(local, mine.to(local.dtype))
        everything.copy_(torch.cat([latents[0::2], latents[1::2]]).to(everything.dtype))

    kernels = SimpleNamespace(cp_gather_cache=gather, gather_and_maybe_dequant_cache=gather)
    monkeypatch.setattr(mla_attention, "ops", kernels)
    monkeypatch.setattr(k3_mla, "ops", kernels)
    seen = {}

    def attend(chunk, q, k, v, out=None):
        seen.update(k=k, v=v)
        return torch.zeros(1), torch.zeros(1)

    chunk = SimpleNamespace(
        num_context_tokens=TOKENS, num_local_context_tokens=len(mine), request_slice=slice(None), num_requests=1,
        token_slice=slice(None), cu_seq_lens=None, token_to_seq=None, starts=None,
        padded_local_cu_seq_lens=torch.zeros(1), padded_local_token_to_seq=torch.zeros(1), local_starts=[0],
        padded_local_seq_lens=[len(mine)], max_seq_len=TOKENS, local_context_lens_allranks=[[TOKENS // 2, TOKENS // 2]],
    )  # fmt: skip
    metadata = SimpleNamespace(
        q_data_type=FP8 if fp8_prefill else torch.bfloat16, block_table=torch.zeros(1),
        prefill_backend=SimpleNamespace(run_prefill_context_chunk=attend),
        chunked_context=SimpleNamespace(
            chunks=[chunk], workspace=workspace, empty_token_slices=[], dcp_manager=SimpleNamespace(kv_gather=exchange)
        ),
    )  # fmt: skip
    impl = SimpleNamespace(
        kv_b_proj=layer, kv_cache_dtype=cache_dtype, kv_lora_rank=LATENT, qk_rope_head_dim=ROPE, num_heads=HEADS,
        num_local_heads=HEADS, qk_nope_head_dim=NOPE, v_head_dim=VALUE, _use_flashinfer_concat_mla_k=False,
        _k_scale=torch.ones(1), _attn_read_kv_cache=lambda: None,
    )  # fmt: skip
    base = mla_attention.MLACommonBaseImpl
    impl._concat_k_nope_k_pe = MethodType(base._concat_k_nope_k_pe, impl)
    impl._gather_context_latent = MethodType(k3_mla.MultiHeadLatentAttention._gather_context_latent, impl)
    return impl, SimpleNamespace(prefill=metadata), seen


@pytest.mark.parametrize("path", ["portable", "K3 on GPUs", "context parallel"])
@pytest.mark.parametrize("cache_dtype,fp8_prefill", [("auto", False), ("fp8", False), ("fp8", True)])
@pytest.mark.parametrize("method", METHODS)
def test_cached_latents_reach_kv_b_as_its_method_accepts_them(
    kv_b, monkeypatch, method, cache_dtype, fp8_prefill, path
):
    """PUBLIC_CASES 38: under FP8 prefill the workspace is FP8, which a method that quantises by itself cannot read."""
    layer, dense = kv_b(method)
    latents = torch.randint(-8, 9, (TOKENS, LATENT + ROPE), generator=torch.Generator().manual_seed(2)) / 8
    dcp = 2 if path == "context parallel" else 1
    impl, metadata, seen = context(layer, latents, cache_dtype, fp8_prefill, dcp, monkeypatch)
    given = []
    layer.register_forward_pre_hook(lambda _, args: given.append(args[0].dtype))
    q = torch.zeros(3, HEADS, NOPE + ROPE, dtype=FP8 if fp8_prefill else torch.bfloat16)
    if path == "portable":
        mla_attention.MLACommonBaseImpl._compute_prefill_context(impl, q, None, metadata, torch.ones(1))
    elif path == "context parallel":
        call = mla_attention.MLACommonBaseImpl._context_parallel_compute_prefill_context
        call(impl, q, None, metadata, torch.ones(1), dcp)
    else:
        join = lambda k_nope, k_pe: torch.cat([k_nope, k_pe.bfloat16()[:, None].expand(-1, HEADS, -1)], -1)  # noqa: E731
        monkeypatch.setattr(k3_mla, "fused_mla_kv_concat", join)
        monkeypatch.setattr(
            k3_mla, "fused_mla_kv_concat_quant_fp8", lambda k, pe, v: (join(k, pe).to(FP8), v.to(FP8))
        )
        k3_mla.MultiHeadLatentAttention._compute_prefill_context(impl, q, metadata)
    takes_fp8 = METHODS[method][2]
    assert given == [FP8 if takes_fp8 and fp8_prefill else torch.bfloat16]
    order = torch.arange(TOKENS).view(-1, 2).T.flatten() if dcp > 1 else slice(None)
    context_latents = latents[order]
    want = (context_latents[:, :LATENT].double() @ dense.double().T).view(TOKENS, HEADS, NOPE + VALUE)
    rel = 2**-4 if fp8_prefill else 2**-8
    bound = rel * want.abs() + 2**-9
    assert ((seen["k"][..., :NOPE].double() - want[..., :NOPE]).abs() <= bound[..., :NOPE]).all()
    assert ((seen["v"].double() - want[..., NOPE:]).abs() <= bound[..., NOPE:]).all()
    rope = context_latents[:, None, LATENT:].double().expand(-1, HEADS, -1)
    assert torch.equal(seen["k"][..., NOPE:].double(), rope)
