# SPDX-License-Identifier: Apache-2.0
"""Block-scaled FP8 linears on Hopper: the choice and the plan anywhere, kernels on a card or emulated."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from tests.kernels.cuda_emulator import card_or_emulator
from tests.kernels.quantization.few_tokens_oracle import e4m3, inputs, reference
from vllm.model_executor.kernels.linear.scaled_mm import hopper_block_fp8 as hopper
from vllm.model_executor.kernels.linear.scaled_mm.block_fp8_few_tokens import (
    MAX_TOKENS,
    FewTokensPlan,
    block_fp8_few_tokens,
    few_tokens_plan,
)
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.quantization import block_fp8_linear
from vllm.model_executor.layers.quantization.modelopt import ModelOptFp8Config
from vllm.platforms import current_platform

# Rows and columns of K3's attention linears on one of 1 and of 8 ranks, padded.
SHAPES = [(49408, 7168), (6400, 7168), (2176, 7168), (18432, 1536), (2304, 1536), (1536, 128), (7168, 1536)]


CLUSTERS = (132, 66, 42, 32, 24, 17, 16, 16)  # of 1 to 8 blocks, as an H200 may hold


def on_hopper() -> bool:
    return current_platform.is_cuda() and current_platform.is_device_capability(90)


@pytest.fixture(autouse=True)
def card(request):
    if request.node.get_closest_marker("sm90") and not on_hopper():
        pytest.skip("needs an NVIDIA GPU of compute capability 9.0")


# ---- anywhere ------------------------------------------------------------------


@pytest.mark.parametrize("rows,columns", SHAPES)
@pytest.mark.parametrize("tokens", [1, 8, 9, 16, 17, 33, 64])
def test_every_block_of_columns_has_one_share_that_fits(rows, columns, tokens):
    plan = few_tokens_plan(tokens, rows, columns, CLUSTERS)
    blocks = columns // 128
    assert plan.width >= tokens
    assert (plan.split - 1) * plan.share < blocks <= plan.split * plan.share and plan.split <= 8
    # A multiprocessor has 228 KiB of shared memory, and takes 1 KiB of it per block itself.
    assert plan.shared + 1024 <= 228 * 1024


@pytest.fixture
def pretend(monkeypatch):
    """Only the choice: no kernel runs."""
    platform = SimpleNamespace(is_cuda=lambda: True, is_device_capability=lambda c: c == 90, is_cpu=lambda: False)
    monkeypatch.setattr(hopper, "current_platform", platform)
    monkeypatch.setattr(block_fp8_linear, "current_platform", platform)
    parent = hopper.CutlassFp8BlockScaledMMKernel
    monkeypatch.setattr(parent, "is_supported", classmethod(lambda cls, capability=None: (True, None)))
    usual = Mock(return_value=Mock(spec=block_fp8_linear.Fp8BlockScaledMMLinearKernel))
    monkeypatch.setattr(block_fp8_linear, "init_fp8_linear_kernel", usual)
    return usual


def test_hopper_takes_its_own_kernel(one_rank, pretend):
    kernel = block_fp8_linear.choose_block_fp8_kernel((6400, 7168), torch.bfloat16, "method")
    assert type(kernel) is hopper.HopperFp8BlockScaledMMKernel and not pretend.called


@pytest.mark.parametrize("dtype,shape", [(torch.float16, (256, 256)), (torch.bfloat16, (200, 256))])
def test_others_are_left_to_the_usual_choice(one_rank, pretend, dtype, shape):
    kernel = block_fp8_linear.choose_block_fp8_kernel(shape, dtype, "method")
    assert kernel is pretend.return_value and pretend.call_count == 1


def test_a_named_backend_and_batch_invariance_come_first(one_rank, pretend, monkeypatch):
    monkeypatch.setattr(block_fp8_linear, "_get_linear_backend", lambda: "triton")
    block_fp8_linear.choose_block_fp8_kernel((256, 256), torch.bfloat16, "method")
    monkeypatch.setattr(block_fp8_linear, "_get_linear_backend", lambda: "auto")
    monkeypatch.setattr(block_fp8_linear.envs, "VLLM_BATCH_INVARIANT", True)
    block_fp8_linear.choose_block_fp8_kernel((256, 256), torch.bfloat16, "method")
    assert pretend.call_count == 2


REFUSED = r"Marlin\w*Kernel was chosen for FP8 weights \(256, 256\).*round the scales to BF16.*"


@pytest.mark.parametrize(
    "backend,way_out", [("marlin", "--linear-backend auto, cutlass or triton"), ("auto", "convert … --attention bf16")]
)
def test_a_kernel_without_blocks_is_refused_before_weights_exist(one_rank, pretend, monkeypatch, backend, way_out):
    """The stand-in's class is all that the choice can see; "auto" comes to it on an Ampere card."""
    pretend.return_value = type("MarlinFP8ScaledMMLinearKernel", (), {})()
    monkeypatch.setattr(block_fp8_linear, "_get_linear_backend", lambda: backend)
    monkeypatch.setattr(hopper.HopperFp8BlockScaledMMKernel, "is_supported", lambda: (False, "too old"))
    config = ModelOptFp8Config("FP8_PB_WO", True, None, [])
    with pytest.raises(ValueError, match=REFUSED + way_out):
        linear.ColumnParallelLinear(256, 256, bias=False, quant_config=config, prefix="m.q_b_proj")


@pytest.mark.sm90
def test_marlin_itself_is_refused(one_rank, monkeypatch):
    """Where upstream would run it: on newer cards than Ampere, it has to be forced."""
    monkeypatch.setenv("VLLM_TEST_FORCE_FP8_MARLIN", "1")
    monkeypatch.setattr(one_rank.kernel_config, "linear_backend", "marlin")
    with pytest.raises(ValueError, match=REFUSED + "--linear-backend auto, cutlass or triton"):
        block_fp8_linear.choose_block_fp8_kernel((256, 256), torch.bfloat16, "method")


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.skipif(not current_platform.is_cpu(), reason="CPU kernels")
def test_a_split_output_is_a_view_of_the_padded_one(one_rank, monkeypatch, split):
    """Rows 128, 12 of 128 and 4 that nothing fills: all padding lies behind them."""
    config = ModelOptFp8Config("FP8_PB_WO", True, None, [])
    layer = linear.MergedColumnParallelLinear(256, [128, 12, 4], bias=False, quant_config=config, prefix="m.in_proj")
    layer.weight.data[-4:].view(torch.uint8).zero_()
    params = dict(layer.named_parameters())
    for shard, rows in enumerate((128, 12)):
        case = inputs(1, 128, 256)
        weight = case["codes"][:rows].to(torch.uint8).view(torch.float8_e4m3fn)
        params["weight"].weight_loader(params["weight"], weight, shard)
        params["weight_scale"].weight_loader(params["weight_scale"], case["scale"], shard)
    layer.quant_method.process_weights_after_loading(layer)
    assert layer.weight.shape == (256, 256), "the widening rows need no block of their own"
    if split:
        layer.output_is_split = True
    y = layer(torch.randn(3, 256))[0]
    assert y.shape == (3, 144) and not y[:, 140:].any() and y[:, :140].abs().min() > 0
    assert y.stride() == ((256, 1) if split else (144, 1))


# ---- on a card, or emulated -------------------------------------------------------------------


def settle(weight):
    """The kernel reads weights before the one in front has ended."""
    if weight.is_cuda:
        torch.cuda.synchronize()


def on_card(tokens, rows, columns, device="cuda"):
    case = {name: t.to(device) for name, t in inputs(tokens, rows, columns).items()}
    weight = case["codes"].to(torch.uint8).view(torch.float8_e4m3fn)
    settle(weight)
    return case, weight


def relative(y, want):
    return ((y.double() - want).norm() / want.norm()).item()


@card_or_emulator("tokens", [(64,)], [(64,)])
def test_every_code_widens_exactly(device, tokens):
    """A unit vector per column reads the weight out."""
    codes = torch.arange(256, device=device)
    codes[codes & 127 == 127] = 0
    weight = codes.repeat(128, 1)[:, :128].contiguous(), codes.repeat(128, 1)[:, 128:].contiguous()
    scale = torch.ones(1, 1, device=device)
    for half in weight:
        for start in (0, 64):
            x = torch.eye(128, dtype=torch.bfloat16, device=device)[start : start + tokens]
            held = half.to(torch.uint8).view(torch.float8_e4m3fn)
            settle(held)
            y = block_fp8_few_tokens(x, held, scale, FewTokensPlan(64, 1, 1))
            want = torch.tensor([e4m3(c) for c in half[0, start : start + tokens].tolist()]).to(device)
            assert torch.equal(y.float(), want[:, None].expand(tokens, 128))


# Tokens, width, blocks of columns, blocks of a cluster, the share of each but the last.
SHARES = [
    (3, 8, 1, 1, 1),
    (8, 8, 13, 1, 13),  # odd, and longer than the ring of copies
    (7, 8, 14, 2, 7),
    (5, 8, 10, 4, 3),
    (33, 64, 3, 3, 1),
    (64, 64, 13, 2, 7),
    (57, 64, 7, 4, 2),
]


@card_or_emulator("tokens,width,blocks,split,share", SHARES[:3] + SHARES[4:6], SHARES)
def test_shares_of_the_columns_add_up(device, tokens, width, blocks, split, share):
    case, weight = on_card(tokens, 256, 128 * blocks, device)
    y = block_fp8_few_tokens(case["x"], weight, case["scale"], FewTokensPlan(width, split, share))
    assert relative(y, reference(**case)) < 2.0**-8


@pytest.mark.sm90
@pytest.mark.parametrize("rows,columns", SHAPES[1:])
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 16, 17, 32, 33, 64])
def test_few_tokens_against_float64(rows, columns, tokens):
    case, weight = on_card(tokens, rows, columns)
    y = torch.ops.vllm.block_fp8_linear_sm90(case["x"], weight, case["scale"])
    assert relative(y, reference(**case)) < 2.0**-8


@pytest.mark.sm90
@pytest.mark.parametrize("rows,columns", SHAPES[1:])
@pytest.mark.parametrize("tokens", [MAX_TOKENS + 1, 300])
def test_more_tokens_round_activations_to_e4m3(rows, columns, tokens):
    case, weight = on_card(tokens, rows, columns)
    y = torch.ops.vllm.block_fp8_linear_sm90(case["x"], weight, case["scale"])
    groups = case["x"].double().unflatten(1, (-1, 128))
    factor = groups.abs().amax(-1, keepdim=True) / 448
    rounded = (groups / factor).float().to(torch.float8_e4m3fn).double() * factor
    want = reference(rounded.flatten(1), case["codes"], case["scale"])
    assert relative(y, want) < 2.0**-7
    assert relative(y, reference(**case)) < 0.05


@pytest.mark.sm90
@pytest.mark.parametrize("offset,width", [(8, 1160), (1, 1153)])
def test_tokens_may_be_columns_of_a_wider_tensor(offset, width):
    """Aligned rows are read where they lie, others are copied first."""
    case, weight = on_card(5, 256, 1024)
    wide = torch.full((5, width), float("nan"), dtype=torch.bfloat16, device="cuda")
    wide[:, offset : offset + 1024] = case["x"]
    y = torch.ops.vllm.block_fp8_linear_sm90(wide[:, offset : offset + 1024], weight, case["scale"])
    assert relative(y, reference(**case)) < 2.0**-8


@pytest.mark.sm90
def test_replays_of_a_graph_are_equal():
    case, weight = on_card(5, 2176, 7168)
    run = lambda: torch.ops.vllm.block_fp8_linear_sm90(case["x"], weight, case["scale"])  # noqa: E731
    first = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(50):
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, first)


@pytest.mark.sm90
def test_one_compiled_graph_serves_every_number_of_tokens():
    case, weight = on_card(200, 256, 1024)

    @torch.compile(dynamic=True, fullgraph=True)
    def layer(x):
        return torch.ops.vllm.block_fp8_linear_sm90(x, weight, case["scale"])[:, :200] + 1

    for tokens in (200, 3, 64, 65):
        x = case["x"][:tokens]
        eager = torch.ops.vllm.block_fp8_linear_sm90(x, weight, case["scale"])[:, :200] + 1
        assert torch.equal(layer(x), eager)
