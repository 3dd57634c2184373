# SPDX-License-Identifier: Apache-2.0
"""Attention residuals on CPU against a per-token loop in float64."""

import pytest
import torch

from vllm.models.kimi_k3.amd.ops.attn_res import attn_res

EPS, OUTPUT_EPS = 1e-5, 1e-3  # unlike, so that one in place of the other shows


def naive(prefix, delta, blocks, norm, qk, output_norm, num_blocks):
    rows = []
    for t in range(len(prefix)):
        x = prefix[t].double() + (0 if delta is None else delta[t].double())
        sources = [blocks[t, i].double() for i in range(num_blocks)] + [x]
        weight = norm.double() * qk.double()
        scores = torch.stack([(weight * s).sum() / (s.square().mean() + EPS).sqrt() for s in sources])
        mixed = sum(p * s for p, s in zip(scores.softmax(0), sources))
        if output_norm is not None:
            mixed = mixed / (mixed.square().mean() + OUTPUT_EPS).sqrt() * output_norm.double()
        rows.append(mixed)
    return torch.stack(rows)


@pytest.mark.parametrize("num_blocks", [0, 1, 3])
@pytest.mark.parametrize("with_delta", [False, True])
@pytest.mark.parametrize("with_norm", [False, True])
def test_equals_naive(num_blocks, with_delta, with_norm):
    g = torch.Generator().manual_seed(num_blocks)
    hidden, tokens = 48, 5
    prefix = torch.randn(tokens, hidden, generator=g)
    delta = torch.randn(tokens, hidden, generator=g) if with_delta else None
    blocks = torch.full((tokens, 5, hidden), torch.nan)
    blocks[:, :num_blocks] = 3 * torch.randn(tokens, num_blocks, hidden, generator=g)
    norm, qk = torch.rand(hidden, generator=g), torch.randn(hidden, generator=g)
    output_norm = torch.rand(hidden, generator=g) if with_norm else None
    want = naive(prefix, delta, blocks, norm, qk, output_norm, num_blocks)
    summed = prefix if delta is None else prefix + delta
    written, kept = prefix.clone(), blocks.clone()
    got = attn_res(written, delta, kept, norm, qk, output_norm, num_blocks, 4, EPS, OUTPUT_EPS)
    torch.testing.assert_close(got.double(), want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(written, summed)
    torch.testing.assert_close(kept[:, 4], summed)
    assert kept[:, num_blocks:4].isnan().all()


def test_no_block_is_written_without_an_index():
    blocks = torch.full((2, 2, 8), torch.nan)
    attn_res(torch.ones(2, 8), None, blocks, torch.ones(8), torch.ones(8), None, 0, -1, EPS, OUTPUT_EPS)
    assert blocks.isnan().all()
