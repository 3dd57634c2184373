# SPDX-License-Identifier: Apache-2.0
"""KDA on CPU against the token-by-token recurrence in float64."""

from types import SimpleNamespace

import pytest
import torch

from vllm.forward_context import ForwardContext, override_forward_context
from vllm.models.kimi_k3.cpu import kda
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata

HEADS, WIDTH = 3, 32


def naive_recurrence(q, k, v, log_decay, beta, state):
    """One sequence, one token and one head at a time, in float64."""
    q, k, v, log_decay, beta, state = (
        x.double() for x in (q, k, v, log_decay, beta, state)
    )
    state, out = state.clone(), torch.zeros_like(v)
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            s = state[h] * torch.exp(log_decay[t, h])[None, :]
            r = (v[t, h] - s @ k[t, h]) * beta[t, h]
            state[h] = s + torch.outer(r, k[t, h])
            out[t, h] = state[h] @ q[t, h]
    return out, state


def inputs(tokens: int, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, HEADS, WIDTH, generator=g) for _ in range(3))
    q, k = kda.l2_normalise(q) * WIDTH**-0.5, kda.l2_normalise(k)
    # Down to the bound of -5: sixteen such steps underflow exp in float32,
    # which a chunked form that divides by cumulated decays does not survive.
    log_decay = -5 * torch.rand(tokens, HEADS, WIDTH, generator=g) ** 3
    beta = torch.rand(tokens, HEADS, generator=g)
    state = torch.randn(HEADS, WIDTH, WIDTH, generator=g)
    return q, k, v, log_decay, beta, state


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65, 130])
def test_prefill_equals_recurrence(tokens):
    args = inputs(tokens)
    out, state = kda.kda_prefill(*args)
    want_out, want_state = naive_recurrence(*args)
    torch.testing.assert_close(out.double(), want_out, atol=2e-5, rtol=1e-5)
    torch.testing.assert_close(state.double(), want_state, atol=2e-5, rtol=1e-5)


def test_prefill_survives_the_strongest_decay():
    q, k, v, log_decay, beta, state = inputs(40)
    args = (q, k, v, torch.full_like(log_decay, -5.0), beta, state)
    out, _ = kda.kda_prefill(*args)
    torch.testing.assert_close(
        out.double(), naive_recurrence(*args)[0], atol=2e-5, rtol=1e-5
    )


def test_decode_equals_recurrence_for_each_sequence():
    args = [inputs(1, seed) for seed in range(5)]
    stacked = [torch.cat(x) for x in list(zip(*args))[:5]]
    states = torch.stack([a[5] for a in args])
    out, new = kda.kda_decode(*stacked, states)
    for i, a in enumerate(args):
        want_out, want_state = naive_recurrence(*a)
        torch.testing.assert_close(out[i].double(), want_out[0], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(new[i].double(), want_state, atol=1e-5, rtol=1e-5)


def test_short_conv_continues_from_its_history():
    g = torch.Generator().manual_seed(1)
    x = torch.randn(1, 9, 5, generator=g)
    weight = torch.randn(5, 4, generator=g)
    whole, last = kda.short_conv(x, weight, torch.zeros(1, 5, 3))
    padded = torch.cat([torch.zeros(1, 3, 5), x], dim=1)[0].double()
    for t in range(9):
        tap = (padded[t : t + 4] * weight.T.double()).sum(0)
        want = tap * torch.sigmoid(tap)
        torch.testing.assert_close(whole[0, t].double(), want, atol=1e-6, rtol=1e-5)
    first, history = kda.short_conv(x[:, :4], weight, torch.zeros(1, 5, 3))
    second, history = kda.short_conv(x[:, 4:], weight, history)
    torch.testing.assert_close(torch.cat([first, second], 1), whole)
    torch.testing.assert_close(history, last)


@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_gates(lower_bound):
    g = torch.Generator().manual_seed(2)
    raw, raw_beta = torch.randn(4, HEADS, WIDTH, generator=g), torch.randn(4, HEADS)
    a_log, bias = torch.randn(HEADS, generator=g), torch.randn(HEADS * WIDTH)
    got, beta = kda.kda_gates(raw, raw_beta, a_log, bias, lower_bound)
    for t, h, d in [(0, 0, 0), (3, 2, 31), (1, 1, 7)]:
        a = (raw[t, h, d] + bias[h * WIDTH + d]).double()
        rate = a_log[h].double().exp()
        if lower_bound is None:
            want = -rate * torch.log1p(torch.exp(a))
        else:
            want = lower_bound / (1 + torch.exp(-rate * a))
        torch.testing.assert_close(got[t, h, d].double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(beta, 1 / (1 + torch.exp(-raw_beta)))


class FakeLayer(SimpleNamespace):
    """What ``kda_forward`` reads of the layer, on an engine-shaped cache."""

    def __init__(self, blocks: int = 6):
        g = torch.Generator().manual_seed(3)
        size = HEADS * WIDTH
        super().__init__(
            prefix="layer",
            local_num_heads=HEADS,
            head_dim=WIDTH,
            gate_lower_bound=-5.0,
            A_log=torch.randn(HEADS, generator=g),
            dt_bias=torch.randn(size, generator=g),
            conv1d=SimpleNamespace(weight=torch.randn(3 * size, 1, 4, generator=g)),
            o_norm=SimpleNamespace(weight=torch.rand(WIDTH, generator=g), eps=1e-5),
            # NaN: whatever is read before it was written shows.
            kv_cache=(
                torch.full((blocks, 3, 3 * size), torch.nan),
                torch.full((blocks, HEADS, WIDTH, WIDTH), torch.nan),
            ),
        )

    def run(self, lengths, blocks, started, tokens):
        """One engine step over requests of the given new-token counts."""
        starts = torch.tensor([0, *lengths]).cumsum(0)
        decodes = sum(1 for n in lengths if n == 1)
        metadata = GDNAttentionMetadata(
            num_prefills=len(lengths) - decodes,
            num_prefill_tokens=sum(lengths) - decodes,
            num_decodes=decodes,
            num_decode_tokens=decodes,
            num_spec_decodes=0,
            num_spec_decode_tokens=0,
            num_actual_tokens=sum(lengths),
            has_initial_state=torch.tensor(started),
            non_spec_query_start_loc=starts,
            non_spec_state_indices_tensor=torch.tensor(blocks, dtype=torch.int32),
        )
        n, size = sum(lengths), HEADS * WIDTH
        qkv, g1, g2, beta = tokens
        out = torch.full((1, n, HEADS, WIDTH), torch.nan)
        context = ForwardContext(
            no_compile_layers={}, attn_metadata={"layer": metadata}, slot_mapping={}
        )
        with override_forward_context(context):
            kda.kda_forward(
                self,
                qkv.view(n, 3 * size),
                g1.view(1, n, HEADS, WIDTH),
                g2.view(n, HEADS, WIDTH),
                beta.view(1, n, HEADS),
                out,
            )
        return out[0]


def layer_tokens(n: int, seed: int):
    g = torch.Generator().manual_seed(seed)
    size = HEADS * WIDTH
    return [torch.randn(n, w, generator=g) for w in (3 * size, size, size, HEADS)]


def test_batched_steps_equal_one_sequence_at_a_time():
    """Two requests, prefilled together, then decoded beside a third's prefill."""
    a, b, c = layer_tokens(20, 1), layer_tokens(7, 2), layer_tokens(1, 3)
    whole = {}
    for name, seq in (("a", a), ("b", b), ("c", c)):
        n = len(seq[0])
        whole[name] = FakeLayer().run([n], [1], [False], seq)
    layer = FakeLayer()

    def cat(*parts):
        return [torch.cat([s[i][lo:hi] for s, lo, hi in parts]) for i in range(4)]

    first = layer.run([18, 5], [4, 2], [False, False], cat((a, 0, 18), (b, 0, 5)))
    torch.testing.assert_close(first[:18], whole["a"][:18], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(first[18:], whole["b"][:5], atol=1e-5, rtol=1e-5)
    # c is a one-token prompt: classified as a decode, its block is garbage.
    step = layer.run(
        [1, 1, 2], [4, 5, 2], [True, False, True], cat((a, 18, 19), (c, 0, 1), (b, 5, 7))
    )
    torch.testing.assert_close(step[0], whole["a"][18], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(step[1], whole["c"][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(step[2:], whole["b"][5:], atol=1e-5, rtol=1e-5)
    last = layer.run([1], [4], [True], cat((a, 19, 20)))
    torch.testing.assert_close(last[0], whole["a"][19], atol=1e-5, rtol=1e-5)


def test_null_block_yields_zeros():
    layer = FakeLayer()
    out = layer.run([1, 1], [0, 3], [False, False], layer_tokens(2, 5))
    assert out[0].abs().max() == 0
    assert out[1].isfinite().all() and out[1].abs().max() > 0
