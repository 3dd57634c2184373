# SPDX-License-Identifier: Apache-2.0
"""Dequantising what a rank holds gives, bit for bit, its slice of the dequantised file, or loading stops.

Every case below goes over all ranks. ``exactness.py`` holds the file, the oracle and the way to make layers; it
shares no arithmetic with what is tested.
"""

import dataclasses
import importlib
import math
import re
from types import SimpleNamespace

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tests.quantization import exactness
from tests.quantization.exactness import (
    ATTENTION,
    BLOCK,
    DIALECTS,
    EXPERT_FORMATS,
    K3_TP_SIZES,
    Linear,
    Shape,
    check_attention,
    check_experts,
    check_linear,
    fp8_tensor,
    held,
    make_attention,
    make_linear,
)
from vllm.model_executor.layers.quantization import block_fp8_linear
from vllm.model_executor.layers.quantization.block_fp8_linear import choose_block_fp8_kernel
from vllm.model_executor.layers.quantization.utils.block_scale_layout import place_span
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="the layers of the CPU platform")

KDA = [name for name, (kind, *_) in ATTENTION.items() if kind == "kda"]
MLA = [name for name, (kind, *_) in ATTENTION.items() if kind == "mla"]

K3 = Shape()
# The same rows in q_b and kv_b, from fewer columns.
K3_NARROW = Shape(q_lora=256, kv_lora=128)
TP_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)


@pytest.fixture(scope="module")
def tp():
    """Rank and size of every layer made meanwhile; no process groups."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with exactness.release() as state:
        yield state
    torch.set_num_threads(threads)
    fp8_tensor.cache_clear()


def assert_exact(verdicts):
    found = {
        name: v.error or f"{v.rows_wrong} of {v.rows} rows are wrong"
        for name, v in verdicts.items()
        if v.error or v.rows_wrong
    }
    assert verdicts and not found, found


# ---- Kimi K3's own shapes -------------------------------------------------------


@pytest.mark.parametrize("size", K3_TP_SIZES)
@pytest.mark.parametrize("cls", KDA)
def test_k3_kda(tp, cls, size):
    """PUBLIC_CASES 15 and 23: 96 heads; b has 96 rows and one scale row, which every rank reads."""
    assert_exact(check_attention(tp, cls, K3, size))


@pytest.mark.parametrize("size", K3_TP_SIZES)
@pytest.mark.parametrize("cls", MLA)
def test_k3_mla_latents_and_gate(tp, cls, size):
    """PUBLIC_CASES 14: kv_a ends in half a block, and what follows it starts with its own scale."""
    assert_exact(check_attention(tp, cls, K3, size, only=("q_a_proj", "kv_a_proj_with_mqa", "g_proj")))


@pytest.mark.parametrize("size", K3_TP_SIZES)
@pytest.mark.parametrize("cls", MLA)
def test_k3_mla_heads(tp, cls, size):
    """PUBLIC_CASES 36: kv_b as GEMM and as absorbed; q_b at TP32 has 4.5 blocks per rank."""
    verdicts = check_attention(tp, cls, K3_NARROW, size, only=("q_b_proj", "kv_b_proj", "o_proj"))
    assert "kv_b_proj absorbed" in verdicts
    assert_exact(verdicts)


@pytest.mark.parametrize("cls,only", [(KDA[0], ()), (KDA[1], ("f_b_proj", "o_proj")), (MLA[0], ())])
def test_k3_in_the_other_public_dialect(tp, cls, only):
    """PUBLIC_CASES 1: rank-2 `weight_scale_inv`, under tensor parallelism."""
    assert_exact(check_attention(tp, cls, K3_NARROW, 8, dialect="weight_scale_inv", only=only))


@pytest.mark.parametrize("size", [1, 8, 32])
@pytest.mark.parametrize("cls", [KDA[1], *MLA])
def test_k3_as_compressed_tensors(tp, cls, size):
    kwargs = {"algo": "compressed-tensors", "dialect": "compressed-tensors"}
    assert_exact(check_attention(tp, cls, K3_NARROW, size, **kwargs))


def test_k3_rows_per_rank(tp):
    """The row counts that the cases above are about."""
    rows = {}
    for size in K3_TP_SIZES:
        tp.rank, tp.size = size - 1, size
        layer = make_attention(KDA[0], K3).linears["in_proj_qkvgfab"]
        rows[size] = sum(layer.logical_widths[:6])
    assert rows == {1: 49376, 2: 24752, 4: 12440, 8: 6284, 16: 3206, 32: 1667}


def test_unequal_inputs_are_seen_by_the_oracle():
    """Each block of a file differs from its neighbours, and buffers that nothing fills are NaN."""
    t = fp8_tensor(18432, 256)
    assert (t.scale[1:] != t.scale[:-1]).all() and (t.scale[:, 0] != t.scale[:, 1]).all()
    assert t.scale[:, 0].unique().numel() == len(t.scale)
    native = t.codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(native, exactness.E4M3[t.codes.int()])
    with exactness.poisoned():
        assert torch.empty(3, dtype=torch.float8_e4m3fn).float().isnan().all()
        assert torch.empty(3).isnan().all()


# ---- other head counts ------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("heads", [8, 16, 64, 96, 192])
@pytest.mark.parametrize("cls", KDA[:2])
def test_kda_of_any_head_count(tp, cls, heads, head_dim):
    """Includes b with two scale rows that TP2 straddles (192 heads), and 12 scale rows at TP8 (24 heads)."""
    shape = Shape(heads=heads, head_dim=head_dim)
    for size in TP_SIZES:
        if heads % size == 0:
            # The classes differ in code, not in arithmetic: every rank of one, the last of the other.
            ranks = None if cls == KDA[0] else [size - 1]
            assert_exact(check_attention(tp, cls, shape, size, ranks=ranks))
        else:
            verdicts = check_attention(tp, cls, shape, size, ranks=[0])
            assert all(v.error for v in verdicts.values())


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12, 24])
def test_twelve_scale_rows(tp, size):
    assert_exact(check_attention(tp, KDA[0], Shape(heads=24, head_dim=64), size))


@pytest.mark.parametrize("heads", [8, 24, 64])
def test_mla_of_any_head_count(tp, heads):
    """Heads of 64 + 32 rows and values of 96: nothing is a multiple of a block."""
    shape = Shape(heads=heads, q_lora=192, kv_lora=160, nope=64, rope=32, v_dim=96)
    for size in TP_SIZES:
        if heads % size == 0:
            assert_exact(check_attention(tp, MLA[size % 2], shape, size))


# ---- other partitions ---------------------------------------------------------------

PARTITIONS = [
    Linear("interior partial", (192, 192)),
    Linear("quarter", (64, 64, 64, 64)),
    Linear("gate and up of 2.5 blocks", (320, 320)),
    Linear("dense of 33 blocks", (33 * 128, 33 * 128)),
    Linear("partial before aligned", (576, 1536)),
    Linear("partial before aligned, whole on each rank", (256, 576, 384), replicated=True),
    Linear("one row each", (32, 32)),
    Linear("continuous over groups", (192, 192), fused_on_disk=True),
    Linear("continuous over three groups", (96, 480, 288), fused_on_disk=True),
    Linear("plain", (18432,), cls="ColumnParallelLinear"),
    Linear("whole", (576,), cols=192, cls="ReplicatedLinear", replicated=True),
    Linear("columns", (96,), cols=33 * 128, cls="RowParallelLinear"),
    Linear("columns of half blocks", (130,), cols=32 * 64, cls="RowParallelLinear"),
]


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("case", PARTITIONS, ids=lambda case: case.name)
def test_partitions(tp, case, dialect):
    """PUBLIC_CASES 14, 16, 17 and 18, on every rank of every size that divides the rows."""
    split = (case.cols,) if case.cls == "RowParallelLinear" else case.rows
    done = 0
    for size in TP_SIZES:
        if case.replicated or all(n % size == 0 for n in split):
            assert_exact(check_linear(tp, case, size, dialect=dialect))
            done += 1
        else:
            assert check_linear(tp, case, size, dialect=dialect, ranks=[0])[case.name].error
    assert done >= 2


SETTINGS = hypothesis.settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)


@SETTINGS
@hypothesis.given(
    size=st.sampled_from(TP_SIZES),
    rows=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    cols=st.sampled_from([1, 64, 128, 200, 256]),
    fused_on_disk=st.booleans(),
    dialect=st.sampled_from(DIALECTS),
    data=st.data(),
)
def test_any_partitions(tp, size, rows, cols, fused_on_disk, dialect, data):
    rank = data.draw(st.integers(0, size - 1))
    case = Linear("any", tuple(r * size for r in rows), cols, fused_on_disk=fused_on_disk)
    assert_exact(check_linear(tp, case, size, dialect=dialect, ranks=[rank]))


@SETTINGS
@hypothesis.given(
    size=st.sampled_from(TP_SIZES), cols=st.integers(1, 300), rows=st.integers(1, 300), data=st.data()
)
def test_any_columns(tp, size, cols, rows, data):
    rank = data.draw(st.integers(0, size - 1))
    case = Linear("any", (rows,), cols * size, cls="RowParallelLinear")
    assert_exact(check_linear(tp, case, size, ranks=[rank]))


@SETTINGS
@hypothesis.given(
    size=st.sampled_from(TP_SIZES),
    heads=st.integers(1, 9),
    head_dim=st.sampled_from([16, 48, 64, 96, 128]),
    cls=st.sampled_from(KDA),
    data=st.data(),
)
def test_any_kda(tp, size, heads, head_dim, cls, data):
    rank = data.draw(st.integers(0, size - 1))
    assert_exact(check_attention(tp, cls, Shape(heads=heads * size, head_dim=head_dim), size, ranks=[rank]))


# ---- four-bit experts -------------------------------------------------------------------


@pytest.mark.parametrize("size", K3_TP_SIZES)
@pytest.mark.parametrize("layout", EXPERT_FORMATS)
def test_k3_experts(one_rank, layout, size):
    """Width 3072, for NVFP4 a tensor scale for each of w1, w2 and w3 of each expert; 96 columns a rank at TP32."""
    assert_exact(check_experts(size, layout=layout))


@pytest.mark.parametrize("size,part", [(16, 192), (32, 96)])
@pytest.mark.parametrize("layout", EXPERT_FORMATS)
def test_k3_experts_widened_by_the_model(one_rank, layout, size, part):
    """PUBLIC_CASES 20 and 21: a rank's part is padded to 256, over poisoned memory, with exact zeros."""
    assert_exact(check_experts(size, layout=layout, padded=256))
    assert 3072 // size == part


@pytest.mark.parametrize("layout,size,exact", [
    ("modelopt", 3, True), ("modelopt", 2, False), ("modelopt", 6, False), ("compressed-tensors", 2, False),
    ("mxfp4", 3, False), ("mxfp4", 1, False),
])  # fmt: skip
def test_experts_that_share_a_block_are_refused(one_rank, layout, size, exact):
    """PUBLIC_CASES 19: width 48 at TP2 is 1.5 blocks of 16 a rank; of 32, it is 1.5 on one rank."""
    verdicts = check_experts(size, layout=layout, width=48, ranks=[0])
    if exact:
        assert_exact(verdicts)
    else:
        for v in verdicts.values():
            assert re.search(r"no multiple of the (NV|MX)FP4 block", v.error), v.error


# ---- loading again, and what must stop ------------------------------------------------


@pytest.mark.parametrize("size,rank", [(1, 0), (2, 1)])
@pytest.mark.parametrize("cls", [*KDA, *MLA])
def test_second_load(tp, cls, size, rank):
    """PUBLIC_CASES 36: other weights, then the first again, in the memory that the kernels hold."""
    from vllm.model_executor.model_loader import reload

    shape = Shape(heads=4, q_lora=256)
    tp.rank, tp.size = rank, size
    attention = make_attention(cls, shape)
    sizes = shape.tensors()[attention.kind]
    reload.record_metadata_for_reloading(attention.model)
    where = None
    for seed in (1, 2, 1):
        files = {n: fp8_tensor(*s, seed) for n, s in sizes.items()}
        if where:
            reload.initialize_layerwise_reload(attention.model)
        attention.model.load_weights(
            (f"{attention.prefix}.{n}.{k}", v) for n, t in files.items() for k, v in t.file().items()
        )
        if where:
            reload.finalize_layerwise_reload(attention.model, SimpleNamespace(dtype=torch.bfloat16))
            assert where == {n: layer.weight.data_ptr() for n, layer in attention.linears.items()}
        else:
            for layer in attention.linears.values():
                layer.quant_method.process_weights_after_loading(layer)
            where = {n: layer.weight.data_ptr() for n, layer in attention.linears.items()}
        verdicts = {n: exactness.Verdict(t.rows, torch.zeros(t.rows, dtype=torch.bool)) for n, t in files.items()}
        for name, layer in attention.linears.items():
            shards = exactness.shards_of(name, layer)
            exactness.compare(held(layer), shards, files, verdicts, rank, size)
            if name == "kv_b_proj":
                exactness.compare(exactness.absorbed(layer), shards, files, verdicts, rank, size)
        assert_exact(verdicts)


@pytest.mark.parametrize("lost", ["b_proj.weight_scale", "f_a_proj.weight", "g_proj.weight_scale"])
def test_what_nothing_loaded_is_named(tp, lost):
    """A parameter still at its sentinel stops loading, whichever shard it is."""
    tp.rank, tp.size = 1, 2
    shape = Shape(heads=4)
    attention = make_attention(KDA[0], shape)
    sizes = shape.tensors()["kda"]
    names = exactness.FUSED["in_proj_qkvgfab"]
    state = {
        f"{attention.prefix}.{n}.{k}": v
        for n in names
        for k, v in fp8_tensor(*sizes[n]).file().items()
        if f"{n}.{k}" != lost
    }
    attention.model.load_weights(state.items())
    layer = attention.linears["in_proj_qkvgfab"]
    tensor, shard = lost.rpartition(".")[2], names.index(lost.partition(".")[0])
    with pytest.raises(ValueError, match=rf"in_proj_qkvgfab\.{tensor} \(shard {shard}\): not in the checkpoint"):
        layer.quant_method.process_weights_after_loading(layer)


@pytest.mark.parametrize("blocks", [(1, 1), (3, 1), (2, 2)])
def test_a_grid_that_does_not_belong_to_the_weight(tp, blocks):
    """b of 192 heads has two scale rows: one or three are refused with layer, found and expected."""
    tp.rank, tp.size = 1, 2
    attention = make_attention(KDA[0], Shape(heads=192, head_dim=64))
    name = f"{attention.prefix}.b_proj.weight_scale"
    with pytest.raises(ValueError, match=r"in_proj_qkvgfab\.weight_scale \(shard 5\).*2x1 blocks") as error:
        attention.model.load_weights([(name, torch.ones(blocks[0], 1, blocks[1], 1))])
    assert str((blocks[0], 1, blocks[1], 1)) in str(error.value)


@pytest.mark.parametrize(
    "case, size, found",
    [
        (Linear("merged", (96, 160)), 5, "fused: 96, 160 rows .* 5 tensor-parallel ranks.*size 1, 2, 4, 8, 16, 32"),
        (Linear("column", (96,), cls="ColumnParallelLinear"), 5, "plain: 96 rows .*size 1, 2, 3, 4, 6, 8, 12, 16, 24"),
        (Linear("row", (128,), cols=96, cls="RowParallelLinear"), 64, "plain: 96 columns .*64 tensor-parallel"),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_sizes_that_ranks_cannot_share_are_refused(tp, case, size, found):
    """When the layer is made: its name, what was to be split, and the sizes that work."""
    tp.rank, tp.size = 0, size
    with pytest.raises(ValueError, match=rf"layers\.0\.self_attn\.{found}"):
        make_linear(case)


@pytest.mark.parametrize("cls", [*KDA, *MLA])
def test_heads_that_ranks_cannot_share_are_refused(tp, cls):
    """PUBLIC_CASES 16: named by the attention layer, before any of its linears."""
    tp.rank, tp.size = 0, 5
    with pytest.raises(ValueError, match=r"self_attn: 96 heads cannot be split over 5 .*size 1, 2, 3, 4, 6, 8, 12"):
        make_attention(cls, K3)


# ---- what stands beside the weights --------------------------------------------------


@pytest.mark.parametrize("cls", KDA)
@pytest.mark.parametrize("shape", [(8,), (1, 1, 8, 1)])
def test_a_log_stored_longer_than_the_heads(tp, cls, shape):
    """PUBLIC_CASES 22: 8 values for 4 heads at TP2; rank 1 takes values 2 and 3."""
    module = importlib.import_module(f"vllm.{ATTENTION[cls][2]}")
    tp.rank, tp.size = 1, 2
    param = torch.nn.Parameter(torch.full((2,), math.nan))
    stored = torch.tensor([1.0, 2, 3, 4, 0, 0, 0, 0]).view(shape)
    module.a_log_weight_loader(0)(param, stored)
    assert param.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("cls", KDA)
@pytest.mark.parametrize(
    "stored,found", [([1.0, 2, 3, 4, 0, 5, 0, 0], "8 values, of which number 5 is 5"), ([1.0, 2, 3], "3 values")]
)
def test_a_log_of_other_heads_is_refused(tp, cls, stored, found):
    """PUBLIC_CASES 22: a tail that is not zero, or heads without a value."""
    tp.rank, tp.size = 1, 2
    param = make_attention(cls, Shape(heads=4)).module.A_log
    with pytest.raises(ValueError, match=rf"layers\.0\.self_attn\.A_log: .*4 heads.*found {found}"):
        param.weight_loader(param, torch.tensor(stored))


# ---- the proof notices ------------------------------------------------------------------


def half_a_block_late(patch):
    """The grid of scales is shifted by half a block wherever the padding leaves room for it."""

    def place(start, rows, block, offset=0):
        placed = place_span(start, rows, block, offset)
        return dataclasses.replace(placed, lead=block // 2) if placed.padded_rows - rows == block // 2 else placed

    patch.setattr(block_fp8_linear, "place_span", place)


def always_rank_0s_scales(patch):
    """Every rank reads the scale rows of rank 0."""
    real = block_fp8_linear._scale_loader

    def wrapped(layer, name, upstream):
        def first_rank(param, *args, **kwargs):
            mine, layer.tp_rank, param.tp_rank = layer.tp_rank, 0, 0
            try:
                upstream(param, *args, **kwargs)
            finally:
                layer.tp_rank = param.tp_rank = mine

        return real(layer, name, first_rank)

    patch.setattr(block_fp8_linear, "_scale_loader", wrapped)


def padding_at_the_tail_only(patch):
    """Partitions follow each other without padding; each block gets its first row's scale."""

    def lay_out(layer, state):
        weight = layer.weight.data
        scale = getattr(layer, state.scale_name).data[::BLOCK, :-1]
        rows, missing = len(weight), -len(weight) % BLOCK
        state.rows = [range(rows)]
        padded = torch.cat((weight.view(torch.uint8), torch.zeros(missing, weight.shape[1], dtype=torch.uint8)))
        return padded.view(weight.dtype), scale.contiguous()

    patch.setattr(block_fp8_linear, "_lay_out", lay_out)


def few_scale_rows_mean_replicated(patch):
    """Fewer scale rows than ranks are taken for a replicated tensor."""
    real = block_fp8_linear._scale_loader

    def wrapped(layer, name, upstream):
        def load(param, loaded, *args, **kwargs):
            if len(loaded) < layer.tp_size:
                loaded = loaded[:1].expand_as(loaded)
            real(layer, name, upstream)(param, loaded, *args, **kwargs)

        return load

    patch.setattr(block_fp8_linear, "_scale_loader", wrapped)


@pytest.mark.parametrize(
    "fault,cls,shape,size,tensor,wrong",
    [
        (half_a_block_late, MLA[0], Shape(heads=8), 2, "kv_a_proj_with_mqa", 4 * 64),
        (always_rank_0s_scales, KDA[0], K3, 2, "q_proj", 6144),
        (padding_at_the_tail_only, KDA[0], Shape(heads=24, head_dim=64), 8, "k_proj", None),
        (few_scale_rows_mean_replicated, KDA[0], Shape(heads=192, head_dim=64), 4, "b_proj", 64),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_planted_faults_are_seen(tp, monkeypatch, fault, cls, shape, size, tensor, wrong):
    fault(monkeypatch)
    verdict = check_attention(tp, cls, shape, size)[tensor]
    assert verdict.error is None
    assert verdict.rows_wrong == wrong if wrong else verdict.rows_wrong > 0


@pytest.mark.parametrize("rows,wrong", [((576, 1536), 768), ((192, 192), 128), ((256, 192), 0)])
def test_tail_padding_would_shift_what_follows(tp, monkeypatch, rows, wrong):
    """Behind half a block, half of the rows get their neighbour's scale; behind whole ones, none do."""
    padding_at_the_tail_only(monkeypatch)
    verdict = check_linear(tp, Linear("merged", rows), 1)["merged"]
    first, second = verdict.wrong.split(rows)
    assert not first.any() and int(second.sum()) == wrong


def test_a_weight_of_unit_vectors_is_what_a_kernel_reads(tp, one_rank):
    """The stand-in for the GEMM gives the CPU kernel's product, on a layer with padding everywhere."""
    tp.rank, tp.size = 1, 3
    case = Linear("merged", (192, 576), cols=200)
    layer = make_linear(case)
    params = dict(layer.named_parameters())
    for shard, rows in enumerate(case.rows):
        t = fp8_tensor(rows, case.cols, shard)
        for name, value in t.file().items():
            params[name].weight_loader(params[name], value, shard)
    layer.quant_method.process_weights_after_loading(layer)
    want = held(layer)
    shape = tuple(layer.weight.shape)
    layer.quant_method.kernel = choose_block_fp8_kernel(shape, torch.float32, "test")
    got = layer.quant_method.apply(layer, torch.eye(200), None)
    assert torch.equal(got.T, want) and math.isfinite(float(want.sum()))
