# SPDX-License-Identifier: Apache-2.0
"""FlashKDA's buffers come from a workspace that the memory profile counts and graph capture locks."""

import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch

from vllm.config import VllmConfig
from vllm.forward_context import set_forward_context
from vllm.models.kimi_k3.nvidia import kda
from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAMetadata
from vllm.v1.worker import workspace

TOKENS, SEQUENCES, HEADS, HEAD_DIM, SCRATCH = 48, 3, 2, 16, 5000
SIZES = {"output": TOKENS * HEADS * HEAD_DIM * 2, "states": SEQUENCES * HEADS * HEAD_DIM**2 * 4, "scratch": SCRATCH}


@pytest.fixture
def manager(monkeypatch):
    """A workspace manager of the CPU, whose allocator has no cache to empty."""
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    monkeypatch.setattr(workspace, "_manager", None)
    workspace.init_workspace_manager(torch.device("cpu"))
    return workspace.current_workspace_manager()


def layer(flashkda=True):
    """What `_forward` reads of a layer; states of sequence n start as n."""
    specs = (
        ((1, TOKENS, HEADS, HEAD_DIM), torch.bfloat16),
        ((SEQUENCES, HEADS, HEAD_DIM, HEAD_DIM), torch.float32),
        ((SCRATCH,), torch.uint8),
    )
    width = HEADS * HEAD_DIM
    return SimpleNamespace(
        prefix="layer",
        head_dim=HEAD_DIM,
        local_projection_size=width,
        kda_prefill_backend="flashkda" if flashkda else "triton",
        gate_lower_bound=-5.0,
        _flashkda_buffer_specs=specs if flashkda else None,
        decode_conv1d_weight=None,
        decode_norm_weight=None,
        kv_cache=(
            torch.zeros(SEQUENCES, 3, 3 * width),
            torch.arange(SEQUENCES).view(-1, 1, 1, 1).expand(-1, *specs[1][0][1:]).float().contiguous(),
        ),
        conv1d=SimpleNamespace(weight=torch.zeros(3 * width, 1, 4)),
        A_log=None,
        dt_bias=None,
        o_norm=lambda output, gate: output,
    )


def run(self, metadata, tokens=TOKENS):
    """`_forward` on seeded inputs, q of which lies in the first third; its output."""
    gen = torch.Generator().manual_seed(1)
    inputs = torch.randn(tokens, 3 * HEADS * HEAD_DIM, generator=gen).to(torch.bfloat16)
    output = torch.full((1, tokens, HEADS, HEAD_DIM), torch.nan, dtype=torch.bfloat16)
    with set_forward_context(metadata and {"layer": metadata}, VllmConfig()):
        kda.KimiK3DeltaAttention._forward(
            self,
            mixed_qkv=inputs,
            g1=torch.empty(1, tokens, HEADS, HEAD_DIM),
            g2=torch.empty(tokens, HEADS, HEAD_DIM),
            beta=torch.empty(1, tokens, HEADS),
            core_attn_out=output,
        )
    return inputs, output


def reserved(manager):
    return sum(w.numel() for w in manager._current_workspaces if w is not None)


def test_a_prefill_after_the_lock_fits_what_the_profile_reserved(manager, monkeypatch):
    """Kernels are stand-ins: the one of FlashKDA doubles q, and adds one to each state in the workspace."""
    third_party = ModuleType("kda")
    for name in ("chunk_kda_with_fused_gate", "fused_recurrent_kda", "fused_recurrent_kda_packed_decode"):
        setattr(third_party, name, None)
    monkeypatch.setitem(sys.modules, "vllm.models.kimi_k3.nvidia.ops.third_party.kda", third_party)
    monkeypatch.setattr(kda, "causal_conv1d_fn", lambda x, *_, **__: x)
    monkeypatch.setattr(kda, "gather_initial_states", lambda states, which, _: states[which])
    seen = []

    def prefill(q, out, initial_state, final_state, workspace, **_):
        seen.append((final_state.untyped_storage().data_ptr(), workspace.shape))
        final_state.copy_(initial_state + 1)
        out.copy_(q * 2)
        return out, final_state

    monkeypatch.setattr(kda, "_flashkda_prefill", prefill)
    mine = layer()
    run(mine, metadata=None)
    size = reserved(manager)
    assert sum(SIZES.values()) <= size < sum(SIZES.values()) + 3 * 256  # each starts on 256 bytes

    manager.lock()
    which = torch.tensor([2, 0])
    metadata = KimiK3KDAMetadata(
        num_prefills=2,
        num_prefill_tokens=40,
        num_decodes=0,
        num_decode_tokens=0,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=40,
        has_initial_state=torch.tensor([True, True]),
        non_spec_query_start_loc=torch.tensor([0, 30, 40], dtype=torch.int32),
        non_spec_state_indices_tensor=which,
    )
    inputs, output = run(mine, metadata, tokens=40)
    assert reserved(manager) == size
    assert seen == [(manager._current_workspaces[0].data_ptr(), (SCRATCH,))]
    torch.testing.assert_close(output.view(40, -1), inputs[:, : HEADS * HEAD_DIM] * 2, rtol=0, atol=0)
    assert [s.unique().tolist() for s in mine.kv_cache[1]] == [[1.0], [1.0], [3.0]]


def test_other_kernels_reserve_nothing(manager):
    run(layer(flashkda=False), metadata=None)
    assert reserved(manager) == 0
