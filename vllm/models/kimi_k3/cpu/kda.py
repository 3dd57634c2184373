# SPDX-License-Identifier: Apache-2.0
"""Kimi Delta Attention (KDA) and its short convolution in plain PyTorch.

Per head, with key width K and value width V, state ``S`` of shape [V, K]:
``S <- S * exp(log_decay)``, ``r = beta * (v - S k)``, ``S <- S + r k^T``,
``o = S q``; ``q`` and ``k`` are l2-normalised and ``q`` is scaled by K^-1/2.
State layout and the meaning of block 0 (the null block: skipped, output zero)
are those of the GPU kernels.
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.utils import NULL_BLOCK_ID

if TYPE_CHECKING:
    from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import (
        KimiGatedDeltaNetAttention,
    )

# Pairwise decays within a chunk cost chunk^2 * K per head, the state update
# chunk * K * V: at K = V = 128 sixteen tokens keep the first well below the
# second, and no exponent is ever positive, whatever the gates.
CHUNK = 16


def l2_normalise(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Scale the last dimension to unit length, eps inside the square root."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)


def kda_gates(
    raw_gate: torch.Tensor,
    raw_beta: torch.Tensor,
    A_log: torch.Tensor,
    dt_bias: torch.Tensor,
    lower_bound: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn projections into per-channel log decays and per-head write strengths.

    Args:
        raw_gate: ``[tokens, heads, K]``.
        raw_beta: ``[tokens, heads]``.
        A_log: ``[heads]`` float32.
        dt_bias: ``[heads * K]`` float32.
        lower_bound: the bounded gate ``lower_bound * sigmoid(exp(A_log) a)``;
            None selects ``-exp(A_log) * softplus(a)``.

    Returns:
        ``log_decay [tokens, heads, K]`` (<= 0) and ``beta [tokens, heads]``,
        both float32.
    """
    a = raw_gate.float() + dt_bias.float().view(raw_gate.shape[1:])
    rate = A_log.float().exp().unsqueeze(-1)
    if lower_bound is None:
        log_decay = -rate * F.softplus(a)
    else:
        log_decay = lower_bound * torch.sigmoid(rate * a)
    return log_decay, torch.sigmoid(raw_beta.float())


def short_conv(
    x: torch.Tensor, weight: torch.Tensor, history: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal depthwise convolution followed by SiLU.

    Args:
        x: ``[sequences, tokens, channels]``.
        weight: ``[channels, width]``, last tap on the current token.
        history: ``[sequences, channels, width - 1]``, the inputs before ``x``.

    Returns:
        Output ``[sequences, tokens, channels]`` and the new history, float32.
    """
    padded = torch.cat([history.float(), x.float().transpose(1, 2)], dim=-1)
    out = F.conv1d(padded, weight.float().unsqueeze(1), groups=weight.shape[0])
    return F.silu(out).transpose(1, 2), padded[..., -history.shape[-1] :]


def kda_decode(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of many sequences at once.

    Args:
        q: ``[sequences, heads, K]`` float32, normalised and scaled; ``k`` likewise.
        k: see ``q``.
        v: ``[sequences, heads, V]`` float32.
        log_decay: ``[sequences, heads, K]``.
        beta: ``[sequences, heads]``.
        state: ``[sequences, heads, V, K]`` float32.

    Returns:
        Output ``[sequences, heads, V]`` and the new state.
    """
    state = state * log_decay.exp().unsqueeze(-2)
    recalled = (state @ k.unsqueeze(-1)).squeeze(-1)
    written = (v - recalled) * beta.unsqueeze(-1)
    state = state + written.unsqueeze(-1) * k.unsqueeze(-2)
    return (state @ q.unsqueeze(-1)).squeeze(-1), state


def kda_prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    log_decay: torch.Tensor,
    beta: torch.Tensor,
    state: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """All tokens of one sequence, ``CHUNK`` at a time.

    Within a chunk, let ``G_i`` be the cumulated log decay up to and including
    token i. Unrolling the recurrence gives the written values ``R`` as the
    solution of a unit lower triangular system, with ``D_ij = exp(G_i - G_j)``::

        R_i + beta_i sum_{j<i} (k_i . D_ij k_j) R_j = beta_i (v_i - S exp(G_i) k_i)
        o_i = S exp(G_i) q_i + sum_{j<=i} (q_i . D_ij k_j) R_j

    Args:
        q: ``[tokens, heads, K]`` float32, normalised and scaled; ``k`` likewise.
        k: see ``q``.
        v: ``[tokens, heads, V]`` float32.
        log_decay: ``[tokens, heads, K]``.
        beta: ``[tokens, heads]``.
        state: ``[heads, V, K]`` float32.

    Returns:
        Output ``[tokens, heads, V]`` and the state after the last token.
    """
    outputs = []
    for start in range(0, q.shape[0], CHUNK):
        stop = min(start + CHUNK, q.shape[0])
        qc, kc, vc, gc = (
            x[start:stop].transpose(0, 1) for x in (q, k, v, log_decay)
        )  # [heads, chunk, .]
        bc = beta[start:stop].T.unsqueeze(-1)
        total = gc.cumsum(1)
        # exp of a masked -inf is 0: pairs with j > i vanish without overflow.
        n = stop - start
        lower = torch.ones(n, n, dtype=torch.bool, device=q.device).tril()
        pair = total.unsqueeze(2) - total.unsqueeze(1)  # [heads, i, j, K]
        pair = pair.masked_fill(~lower.unsqueeze(-1), -torch.inf).exp()
        decayed_k = pair * kc.unsqueeze(1)
        kk = torch.einsum("hik,hijk->hij", kc, decayed_k).tril(-1)
        qk = torch.einsum("hik,hijk->hij", qc, decayed_k)
        from_start = total.exp()
        recalled = (kc * from_start) @ state.transpose(1, 2)
        written = torch.linalg.solve_triangular(
            bc * kk, bc * (vc - recalled), upper=False, unitriangular=True
        )
        out = (qc * from_start) @ state.transpose(1, 2) + qk @ written
        to_end = (total[:, -1:] - total).exp()
        state = state * from_start[:, -1:] + written.transpose(1, 2) @ (kc * to_end)
        outputs.append(out.transpose(0, 1))
    return torch.cat(outputs), state


def kda_forward(
    layer: "KimiGatedDeltaNetAttention",
    mixed_qkv: torch.Tensor,
    g1: torch.Tensor,
    g2: torch.Tensor,
    beta: torch.Tensor,
    core_attn_out: torch.Tensor,
) -> None:
    """Run KDA for one engine step; the CPU side of the layer's ``_forward``.

    Args:
        layer: holds weights, and caches ``(conv_state, recurrent_state)``.
        mixed_qkv: ``[tokens, 3 * heads * head_dim]`` before the convolution.
        g1: ``[1, tokens, heads, head_dim]`` raw decay gate.
        g2: ``[tokens, heads, head_dim]`` raw output gate.
        beta: ``[1, tokens, heads]`` raw write strength.
        core_attn_out: ``[1, tokens, heads, head_dim]``, written in place.
    """
    metadata = get_forward_context().attn_metadata
    if metadata is None:  # profiling run: caches do not exist yet
        core_attn_out.zero_()
        return
    assert isinstance(metadata, dict)
    m = metadata[layer.prefix]
    assert isinstance(m, GDNAttentionMetadata)
    assert m.spec_sequence_masks is None, "refused by the layer's constructor"
    assert m.non_spec_query_start_loc is not None
    assert m.non_spec_state_indices_tensor is not None

    conv_cache, state_cache = layer.kv_cache
    if not is_conv_state_dim_first():
        conv_cache = conv_cache.transpose(-1, -2)
    heads, width = layer.local_num_heads, layer.head_dim
    conv_weight = layer.conv1d.weight.flatten(1)
    scale = width**-0.5
    log_decay, beta = kda_gates(
        g1[0], beta[0], layer.A_log, layer.dt_bias, layer.gate_lower_bound
    )

    def step(rows: slice, blocks: torch.Tensor, fresh: torch.Tensor, run) -> None:
        """Convolve and attend ``rows``, reshaped to [len(blocks), tokens, .]."""
        n = blocks.numel()
        # Not a product: what another request left may be inf or NaN.
        history = conv_cache[blocks].float()
        history = history.masked_fill(fresh.view(n, 1, 1), 0)
        state = state_cache[blocks].float().masked_fill(fresh.view(n, 1, 1, 1), 0)
        x = mixed_qkv[rows].view(n, -1, mixed_qkv.shape[-1])
        x, history = short_conv(x, conv_weight, history)
        q, k, v = x.view(-1, 3, heads, width).unbind(1)
        q, k = l2_normalise(q) * scale, l2_normalise(k)
        out, state = run(q, k, v, log_decay[rows], beta[rows], state)
        conv_cache[blocks] = history.to(conv_cache.dtype)
        state_cache[blocks] = state.to(state_cache.dtype)
        padding = (blocks == NULL_BLOCK_ID).repeat_interleave(out.shape[0] // n)
        out = out.masked_fill(padding.view(-1, 1, 1), 0)
        core_attn_out[0, rows] = out.to(core_attn_out.dtype)

    def prefill(q, k, v, log_decay, beta, state):
        out, state = kda_prefill(q, k, v, log_decay, beta, state[0])
        return out, state.unsqueeze(0)

    core_attn_out[:, m.num_actual_tokens :].zero_()
    starts = m.non_spec_query_start_loc.tolist()
    blocks = m.non_spec_state_indices_tensor.long()
    assert m.has_initial_state is not None
    fresh = ~m.has_initial_state
    if m.num_decodes:
        n = m.num_decodes
        step(slice(0, n), blocks[:n], fresh[:n], kda_decode)
    for i in range(m.num_decodes, m.num_decodes + m.num_prefills):
        rows = slice(starts[i], starts[i + 1])
        step(rows, blocks[i : i + 1], fresh[i : i + 1], prefill)
    gate = g2.float().sigmoid()
    normed = F.rms_norm(
        core_attn_out[0].float(), (width,), layer.o_norm.weight.float(), layer.o_norm.eps
    )
    core_attn_out[0] = (normed * gate).to(core_attn_out.dtype)
