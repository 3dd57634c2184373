# SPDX-License-Identifier: Apache-2.0
"""NVFP4 SiTU experts for SM90: the packed layout anywhere, the kernels on a Hopper card or emulated.

The reference decodes NVFP4 code by code and computes in float64.
"""

import pytest
import torch

from tests.kernels.cuda_emulator import card_or_emulator
from vllm.model_executor.layers.fused_moe.experts import (
    nvfp4_situ_sm90_kernels as kernels,
)
from vllm.model_executor.layers.fused_moe.experts import (
    nvfp4_situ_sm90_layout as layout,
)
from vllm.model_executor.layers.fused_moe.experts import nvfp4_situ_sm90_ops as ops
from vllm.model_executor.layers.fused_moe.experts.nvfp4_situ_sm90_ops import Plan

BETA, LINEAR_BETA = 4.0, 25.0
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
LEVELS = torch.cat([LEVELS, -LEVELS])
SHARED = 232448  # bytes a block may have on SM90


def decode(codes, scales):
    """Code times block scale in float64; the tensor scale is left out."""
    value = LEVELS[torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int().cpu()]
    return value * scales.cpu().double().repeat_interleave(16, -1)


def random_bank(shape, seed):
    """Codes and e4m3 scales of every kind: negative, zero and subnormal too."""
    gen = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 256, (*shape[:-1], shape[-1] // 2), generator=gen)
    bits = torch.randint(0, 256, (*shape[:-1], shape[-1] // 16), generator=gen)
    bits[(bits & 0x7F) == 0x7F] = 0
    return codes.byte(), bits.byte().view(torch.float8_e4m3fn)


# ---- layout ------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(64, 128), (32, 192), (128, 384)])
@pytest.mark.parametrize("order", ["gate_up", "down"])
def test_packing_keeps_every_weight(shape, order):
    codes, scales = random_bank(shape, 0)
    rows = {
        "gate_up": lambda: layout.gate_up_rows(shape[0] // 2),
        "down": lambda: layout.down_rows(shape[0]),
    }[order]()
    assert sorted(rows.tolist()) == list(range(shape[0]))
    packed, packed_scales = layout.pack_bank(codes, scales, rows)
    found = layout.dequantize_packed(packed, packed_scales, rows)
    assert torch.equal(found[:, : shape[1]].double(), decode(codes, scales) + 0.0)
    assert not found[:, shape[1] :].any()


def test_codes_fill_their_words_without_a_gap():
    """All bits of a code set, all bits of its word set: no two codes share one."""
    codes = torch.full((16, 64), 0xFF, dtype=torch.uint8)
    scales = torch.ones(16, 8).to(torch.float8_e4m3fn)
    packed, _ = layout.pack_bank(codes, scales, layout.down_rows(16))
    assert (packed == 0xFF).all()


def test_every_code_times_every_scale_is_exact_in_bf16():
    bits = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    weight = LEVELS[:, None] * bits / layout.WEIGHT_FACTOR
    assert torch.equal(weight.bfloat16().double(), weight)
    assert weight[weight != 0].abs().min() >= torch.finfo(torch.bfloat16).tiny


def test_bytes_are_the_checkpoints():
    codes, scales = random_bank((2, 256, 256), 1)
    packed, packed_scales = layout.pack_experts(codes, scales, gated=True)
    assert packed.numel() == codes.numel() and packed_scales.numel() == scales.numel()
    assert packed.shape[0] == packed_scales.shape[0] == 2


def test_width_is_padded_with_zero_weights():
    codes, scales = random_bank((1, 2 * 96, 128), 2)
    packed, packed_scales = layout.pack_experts(codes, scales, gated=True)
    rows = layout.gate_up_rows(128)
    found = layout.dequantize_packed(packed[0], packed_scales[0], rows).unflatten(
        0, (2, 128)
    )
    expected = decode(codes, scales)[0].unflatten(0, (2, 96)) + 0.0
    assert torch.equal(found[:, :96].double(), expected)
    assert not found[:, 96:].any()


@pytest.mark.parametrize("gated,shape,grows", [(True, (3, 256, 256), False), (False, (3, 32, 256), False),
                                               (True, (3, 192, 256), True), (False, (3, 32, 192), True)])  # fmt: skip
def test_in_place_is_the_same_without_a_second_bank(gated, shape, grows):
    """Each expert overwrites itself only; what is padded has no room there, and is left as it was."""
    codes, scales = random_bank(shape, 4)
    want = layout.pack_experts(codes.clone(), scales.clone(), gated)
    held = [t.clone() for t in (codes, scales)]
    got = layout.pack_experts(*held, gated, in_place=True)
    for bank, before, packed, expected in zip(held, (codes, scales), got, want):
        assert torch.equal(packed, expected)
        assert (packed.data_ptr() == bank.data_ptr()) != grows
        assert torch.equal(bank.view(torch.uint8), before.view(torch.uint8)) == grows


def test_nan_scale_is_refused():
    codes, scales = random_bank((16, 128), 3)
    scales.view(torch.uint8)[3, 2] = 0x7F
    with pytest.raises(ValueError, match="NaN"):
        layout.pack_bank(codes, scales, layout.down_rows(16))


@pytest.mark.parametrize("experts,choices,width", [(112, 2, 3072), (896, 16, 384)])
def test_every_plan_fits_shared_memory(experts, choices, width):
    for tokens in (1, 7, 16, 64, 200, 256, 300, 512, 1024, 2048, 4096, 20000):
        plan = ops.plan_for(tokens, choices, experts)
        for phase, columns in ((1, 3584), (2, width)):
            macros, shared = plan.macros(phase, columns // 128)
            assert shared + 4096 <= SHARED and macros["STAGES"] >= (4 if plan.large else 3)
            source = kernels.source(**macros)
            assert "ENTRY nvfp4_situ_" in source
            for width in plan.widths if plan.large else ():
                assert f"m64n{width}k16" in source


def test_widths_of_every_plan_can_be_told_to_the_router():
    """Four bits each, in eights, descending; the last of eight counters ends the list."""
    for _, plan in ops._PLANS:
        assert 1 <= len(plan.widths) < 8 and (plan.large or len(plan.widths) == 1)
        assert all(width % 8 == 0 and 8 <= width <= 120 for width in plan.widths)
        assert list(plan.widths) == sorted(set(plan.widths), reverse=True)


# ---- kernels -----------------------------------------------------------------

SMALL = Plan(8, rows=1, split=2, held=9)
NARROW = Plan(24, narrower=(16, 8), large=True, pair=4)
WIDE = Plan(96, narrower=(88, 80, 72, 64), large=True)
PLANS = [
    Plan(8, rows=2, split=4),
    Plan(8, rows=2, split=1),
    SMALL,
    Plan(16, rows=2, split=1, warps=8),
    Plan(16, narrower=(8,), large=True, pair=4),
    NARROW,
    Plan(48, narrower=(32,), large=True),
    WIDE,
]


class Layer:
    def __init__(self, experts, width, hidden, seed, device="cuda"):
        gen = torch.Generator().manual_seed(seed)

        def bank(rows, columns):
            codes, _ = random_bank((experts, rows, columns), seed)
            scales = torch.rand(experts, rows, columns // 16, generator=gen) + 0.25
            return codes, scales.to(torch.float8_e4m3fn)

        self.w13, self.w13_scale = bank(2 * width, hidden)
        self.w2, self.w2_scale = bank(hidden, width)
        self.alpha13 = (torch.rand(experts, 2, generator=gen) + 0.2) / hidden**0.5
        self.alpha2 = (torch.rand(experts, generator=gen) + 0.2) / width**0.5
        self.width, self.gen, self.device = width, gen, device

    def packed(self):
        return tuple(
            x.to(self.device)
            for x in (
                *layout.pack_experts(self.w13, self.w13_scale, gated=True),
                self.alpha13,
                *layout.pack_experts(self.w2, self.w2_scale, gated=False),
                self.alpha2,
            )
        )

    def reference(self, x, weights, ids):
        """``ids`` are local; a negative one adds nothing."""
        w13, w2 = decode(self.w13, self.w13_scale), decode(self.w2, self.w2_scale)
        w13 = w13.unflatten(1, (2, -1)) * self.alpha13.double()[..., None, None]
        w2 = w2 * self.alpha2.double()[:, None, None]
        out = torch.zeros(x.shape, dtype=torch.float64)
        for m, token in enumerate(x.cpu().double()):
            for weight, e in zip(weights[m].tolist(), ids[m].tolist()):
                if e >= 0:
                    gate, up = w13[e, 0] @ token, w13[e, 1] @ token
                    h = BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate)
                    h = h * LINEAR_BETA * torch.tanh(up / LINEAR_BETA)
                    out[m] += weight * (w2[e] @ h)
        return out


def run(packed, x, weights, ids, plan, expert_map=None, out=None):
    pairs, width = ids.numel(), packed[0].shape[1] * 8
    out = torch.full_like(x, float("nan")) if out is None else out
    poison = [
        torch.full((n,), float("nan"), dtype=x.dtype, device=x.device)
        for n in ops.workspace_sizes(pairs, width, x.shape[1])
    ]
    total = packed[0].shape[0] if expert_map is None else expert_map.numel()
    ops.nvfp4_situ_moe(
        out,
        x,
        *packed,
        weights,
        ids,
        expert_map,
        total,
        BETA,
        LINEAR_BETA,
        *poison,
        plan,
    )
    return out


def inputs(layer, tokens, choices, experts, hidden):
    x = torch.randn(tokens, hidden, generator=layer.gen).bfloat16().to(layer.device)
    ids = torch.rand(tokens, experts, generator=layer.gen).topk(choices).indices.int()
    weights = torch.rand(tokens, choices, generator=layer.gen)
    return x, weights.to(layer.device), ids.to(layer.device)


def assert_close(found, expected):
    # bf16 activations between the GEMMs and a bf16 result: 2**-9 each, in the mean.
    error = (found.double().cpu() - expected).norm() / expected.norm()
    assert error < 5e-3


@pytest.fixture(autouse=True)
def needs_card(request):
    if request.node.get_closest_marker("sm90") and not (
        torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    ):
        pytest.skip("needs a Hopper card")


SIZES = (1, 128, 256), (150, 192, 384)


@card_or_emulator(
    "plan,tokens,width,hidden", [(plan, *size) for plan in (None, *PLANS) for size in SIZES], [(None, 150, 192, 384)]
)
def test_layer_against_float64(device, plan, tokens, width, hidden):
    layer = Layer(6, width, hidden, tokens, device)
    x, weights, ids = inputs(layer, tokens, 3, 6, hidden)
    expected = layer.reference(x, weights, ids)
    assert_close(run(layer.packed(), x, weights, ids, plan), expected)
    assert_close(run(layer.packed(), x, weights, ids.long(), plan), expected)


@card_or_emulator("plan,width,hidden", [(plan, 128, 256) for plan in PLANS], [(SMALL, 256, 512), (NARROW, 192, 384)])
def test_expert_map_and_absent_choices(device, plan, width, hidden):
    layer = Layer(5, width, hidden, 7, device)
    x, weights, ids = inputs(layer, 40, 4, 12, hidden)
    expert_map = torch.full((12,), -1, dtype=torch.int32)
    expert_map[[1, 4, 5, 9, 11]] = torch.tensor([3, 0, 2, 4, 1], dtype=torch.int32)
    ids[::3, 1] = -1
    ids[7] = -1
    local = torch.where(ids.cpu() >= 0, expert_map[ids.cpu().clamp(min=0).long()], -1)
    out = run(layer.packed(), x, weights, ids, plan, expert_map.to(device))
    assert_close(out, layer.reference(x, weights, local))
    assert not out[7].any()


@card_or_emulator(  # 2 and 3, 2 and 4 chunks; rows that fill no block
    "plan,width,hidden",
    [(plan, *size) for plan in PLANS for size in ((192, 384), (256, 512))],
    [(SMALL, 256, 512), (NARROW, 192, 384), (WIDE, 192, 384)],
)
def test_experts_at_the_bounds_of_widths(device, plan, width, hidden):
    sizes = [0, 1, 8, 9, 64, 65, 97, 200]
    layer = Layer(len(sizes), width, hidden, 17, device)
    order = torch.randperm(sum(sizes), generator=layer.gen)
    ids = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))[order, None].int().to(device)
    x = torch.randn(len(order), hidden, generator=layer.gen).bfloat16().to(device)
    weights = torch.rand(len(order), 1, generator=layer.gen).to(device)
    packed = layer.packed()
    out = run(packed, x, weights, ids, plan)
    assert_close(out, layer.reference(x, weights, ids))
    assert torch.equal(run(packed, x, weights, ids, plan), out)


@pytest.mark.sm90
@pytest.mark.parametrize("plan", [None, *PLANS], ids=str)
def test_all_tokens_at_one_expert(plan):
    layer = Layer(3, 128, 256, 18)
    x, weights, ids = inputs(layer, 500, 1, 3, 256)
    ids.fill_(1)
    assert_close(run(layer.packed(), x, weights, ids, plan), layer.reference(x, weights, ids))


@card_or_emulator("tokens,width,hidden", [(700, 128, 256)], [(260, 192, 384)])  # more than 2048 pairs
def test_many_pairs_take_the_routers_other_path(device, tokens, width, hidden):
    layer = Layer(40, width, hidden, 11, device)
    x, weights, ids = inputs(layer, tokens, 8, 40, hidden)
    assert_close(
        run(layer.packed(), x, weights, ids, None), layer.reference(x, weights, ids)
    )


@pytest.mark.sm90
def test_no_tokens_and_no_local_expert():
    layer = Layer(4, 128, 256, 12)
    packed = layer.packed()
    x, weights, ids = inputs(layer, 3, 2, 4, 256)
    run(packed, x[:0], weights[:0], ids[:0], None)
    for plan in PLANS:
        assert not run(packed, x, weights, torch.full_like(ids, -1), plan).any()


@pytest.mark.sm90
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_graph_replays_give_the_same_bits_on_new_inputs(plan):
    layer = Layer(6, 128, 256, 13)
    packed = layer.packed()
    x, weights, ids = inputs(layer, 64, 3, 6, 256)
    out = run(packed, x, weights, ids, plan)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(packed, x, weights, ids, plan, out=out)
    for _ in range(3):
        new = inputs(layer, 64, 3, 6, 256)
        for old, value in zip((x, weights, ids), new):
            old.copy_(value)
        expected = run(packed, *new, plan)
        graph.replay()
        assert torch.equal(out, expected)


@pytest.mark.sm90
@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_scale_moved_between_block_and_tensor_changes_nothing(plan):
    layer = Layer(4, 128, 256, 14)
    x, weights, ids = inputs(layer, 20, 2, 4, 256)
    before = run(layer.packed(), x, weights, ids, plan)
    for bank in ("w13", "w2"):
        scales = getattr(layer, f"{bank}_scale").float() / 2
        setattr(layer, f"{bank}_scale", scales.to(torch.float8_e4m3fn))
    layer.alpha13 *= 2
    layer.alpha2 *= 2
    assert torch.equal(run(layer.packed(), x, weights, ids, plan), before)


@pytest.mark.sm90
def test_experts_may_be_rearranged():
    layer = Layer(6, 128, 256, 15)
    x, weights, ids = inputs(layer, 30, 3, 6, 256)
    packed = layer.packed()
    before = run(packed, x, weights, ids, None)
    order = torch.tensor([4, 2, 5, 0, 1, 3], device="cuda")
    moved = tuple(p[order].contiguous() for p in packed)
    place = torch.argsort(order).int()
    assert torch.equal(run(moved, x, weights, place[ids.long()], None), before)
