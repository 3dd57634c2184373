# SPDX-License-Identifier: Apache-2.0
"""A rank's expert width: the rule alone, and what the model's own class makes of it."""

import importlib
import inspect
from types import SimpleNamespace

import pytest
import torch

from vllm.distributed import parallel_state
from vllm.model_executor.layers.fused_moe import all2all_utils
from vllm.models.kimi_k3.common.expert_width import ExpertWidth, expert_width
from vllm.platforms import current_platform
from vllm.transformers_utils.configs.kimi_linear import KimiLinearConfig

K3_WIDTH = 3072

# (tensor parallel, data parallel, expert parallel) → columns in the file, columns in memory, ranks per expert.
TABLE = {
    (1, 1, False): (3072, 3072, 1),
    (8, 1, False): (384, 384, 8),
    (16, 1, False): (192, 256, 16),
    (8, 4, False): (96, 256, 32),
    (1, 16, False): (192, 256, 16),
    (16, 1, True): (3072, 3072, 1),
    (16, 4, True): (3072, 3072, 1),
}


@pytest.mark.parametrize("parallel", TABLE, ids=str)
def test_k3_table(parallel):
    """PUBLIC_CASES 21: 384; 192 and 96, padded to the 256 that the kernels want; 3072."""
    logical, physical, ranks = TABLE[parallel]
    width = expert_width(K3_WIDTH, *parallel)
    assert width == ExpertWidth(logical, physical, ranks)
    assert width.padded == (physical != logical) and width.total == physical * ranks


def test_a_config_may_ask_for_less():
    assert expert_width(128, 2, minimum=32) == ExpertWidth(64, 64, 2)
    assert expert_width(128, 1) == ExpertWidth(128, 128, 1)  # one rank runs what the file has


@pytest.mark.parametrize("tp,dp", [(5, 1), (8, 5), (1, 7)])
def test_shares_that_do_not_come_out_even_are_refused(tp, dp):
    """Rounded down, the last columns of every expert would be on no rank."""
    with pytest.raises(ValueError, match=rf"3072 is no multiple of the {tp * dp} ranks .*--enable-expert-parallel"):
        expert_width(K3_WIDTH, tp, dp)
    assert expert_width(K3_WIDTH, tp, dp, True).logical == K3_WIDTH


CLASSES = ["vllm.models.kimi_k3.nvidia.model", "vllm.models.kimi_k3.amd.linear"]


def make_moe(module, config, monkeypatch, experts, rank, tp, dp, ep):
    """KimiMoE with NaN wherever nothing is written, on rank `rank` of tp·dp without any of the others."""
    cls = importlib.import_module(module).KimiMoE
    for group, size, at in ((parallel_state._TP, tp, rank % tp), (parallel_state._DP, dp, rank // tp)):
        monkeypatch.setattr(group, "world_size", size)
        monkeypatch.setattr(group, "rank_in_group", at)
    manager = SimpleNamespace(world_size=tp * dp, rank=rank)  # nothing is sent
    monkeypatch.setattr(all2all_utils, "get_ep_all2all_manager", lambda stage: manager)
    monkeypatch.setattr(config.parallel_config, "enable_expert_parallel", ep)
    monkeypatch.setattr(config.compilation_config, "static_forward_context", {})
    monkeypatch.setattr(torch.cuda, "Event", SimpleNamespace)
    model = KimiLinearConfig(
        hidden_size=16, num_experts=experts, num_experts_per_token=1, num_shared_experts=None, hidden_act="situ",
        moe_intermediate_size=K3_WIDTH, routed_expert_hidden_size=8, latent_moe_use_norm=True,
        activation_situ_beta=4.0, activation_situ_linear_beta=25.0, use_grouped_topk=True, num_expert_group=1,
        topk_group=1, moe_router_activation_func="sigmoid", moe_renormalize=True,
    )  # fmt: skip
    kwargs = {"vllm_config": config} if "vllm_config" in inspect.signature(cls.__init__).parameters else {}
    empty = torch.empty
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *a, **k: empty(*a, **k).fill_(k.get("dtype") is torch.int32 or torch.nan))
        return cls(model, prefix="model.layers.1.block_sparse_moe", **kwargs)


@pytest.mark.skipif(not current_platform.is_cpu(), reason="experts that are read as stored")
@pytest.mark.parametrize("parallel", TABLE, ids=str)
@pytest.mark.parametrize("module", CLASSES)
def test_the_model_holds_its_share_and_zeros(one_rank, monkeypatch, module, parallel):
    """PUBLIC_CASES 21 and 20: the last rank's columns of a BF16 file, and nothing uninitialised behind them."""
    tp, dp, ep = parallel
    logical, physical, ranks = TABLE[parallel]
    rank, experts = tp * dp - 1, tp * dp if ep else 1
    moe = make_moe(module, one_rank, monkeypatch, experts, rank, *parallel)
    layer = moe.experts.routed_experts
    assert (layer.w13_weight.shape[1], layer.w2_weight.shape[2]) == (2 * physical, physical)
    names = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name, layer.ckpt_down_proj_name
    shapes = (K3_WIDTH, 8), (K3_WIDTH, 8), (8, K3_WIDTH)
    gate, up, down = file = [torch.randn(shape, generator=torch.Generator().manual_seed(3)) for shape in shapes]
    for _ in layer.load_weights((f"{experts - 1}.{n}.weight", w) for n, w in zip(names, file)):
        pass
    layer.quant_method.process_weights_after_loading(layer)
    mine = slice(0, K3_WIDTH) if ep else slice(rank * logical, (rank + 1) * logical)
    got_gate, got_up = layer.w13_weight[-1].split(physical)
    got_down = layer.w2_weight[-1].T
    for got, want in ((got_gate, gate[mine]), (got_up, up[mine]), (got_down, down.T[mine])):
        assert torch.equal(got[:logical], want) and not got[logical:].any()


@pytest.mark.skipif(not current_platform.is_cpu(), reason="the layers of the CPU platform")
@pytest.mark.parametrize("module", CLASSES)
def test_load_balancing_is_refused_and_not_ignored(one_rank, monkeypatch, module):
    """PUBLIC_CASES 35, where the platform would allow it: the model makes no redundant experts."""
    monkeypatch.setattr(one_rank.parallel_config, "enable_eplb", True)
    with pytest.raises(ValueError, match="Kimi K3 does not support .*EPLB"):
        make_moe(module, one_rank, monkeypatch, 4, 0, 2, 1, True)
