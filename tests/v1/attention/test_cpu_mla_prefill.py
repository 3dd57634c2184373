# SPDX-License-Identifier: Apache-2.0
"""MLA prefill on CPU: requests with and without context in the paged cache."""

from types import SimpleNamespace

import pytest
import torch

from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.attention.backends.mla.prefill.cpu import CPUMLAPrefillBackend

HEADS, NOPE, ROPE, VALUE, RANK, PAGE = 2, 6, 4, 5, 8, 16
SCALE = 0.3


def naive(q, latent, kv_b):
    """One request in float64, query by query; its queries are the last tokens."""
    q, latent, kv_b = q.double(), latent.double(), kv_b.double()
    out = []
    for i in range(len(q)):
        seen = latent[: len(latent) - len(q) + i + 1]
        kv = (seen[:, :RANK] @ kv_b.T).view(len(seen), HEADS, NOPE + VALUE)
        heads = []
        for h in range(HEADS):
            k = torch.cat([kv[:, h, :NOPE], seen[:, RANK:]], dim=1)
            heads.append((k @ q[i, h] * SCALE).softmax(0) @ kv[:, h, NOPE:])
        out.append(torch.cat(heads))
    return torch.stack(out)


@pytest.mark.parametrize("contexts", [[0, 0, 0], [16, 0, 5], [33, 1, 16]])
def test_context_and_new_tokens_in_one_pass(contexts):
    g = torch.Generator().manual_seed(sum(contexts))
    news = [3, 1, 7]
    kv_b = torch.randn(HEADS * (NOPE + VALUE), RANK, generator=g)
    cache = torch.full((12, PAGE, RANK + ROPE), torch.nan)
    free = iter(torch.randperm(12, generator=g).tolist())
    latents, tables = [], torch.zeros(3, 4, dtype=torch.int32)
    for i, (context, new) in enumerate(zip(contexts, news)):
        latents.append(torch.randn(context + new, RANK + ROPE, generator=g))
        for page in range(-(-context // PAGE)):
            block = next(free)
            rows = latents[i][page * PAGE : min(context, (page + 1) * PAGE)]
            cache[block, : len(rows)] = rows
            tables[i, page] = block
    q = torch.randn(sum(news), HEADS, NOPE + ROPE, generator=g)
    new = torch.cat([latent[-n:] for latent, n in zip(latents, news)])

    impl = object.__new__(CPUMLAImpl)
    impl.num_heads, impl.kv_lora_rank = HEADS, RANK
    impl.qk_nope_head_dim, impl.v_head_dim = NOPE, VALUE
    impl._use_flashinfer_concat_mla_k = False
    impl.kv_b_proj = lambda x: (x @ kv_b.T, None)
    backend = CPUMLAPrefillBackend(HEADS, SCALE, RANK, NOPE, ROPE, VALUE, None)
    prefill = SimpleNamespace(
        query_start_loc=torch.tensor([0, *news]).cumsum(0),
        block_table=tables,
        chunked_context=SimpleNamespace(context_lens_list=contexts) if any(contexts) else None,
        prefill_backend=backend,
    )
    backend.prepare_metadata(prefill)
    output = torch.full((sum(news), HEADS * VALUE), torch.nan)
    impl.forward_mha(
        q,
        new[:, :RANK],
        new[:, None, RANK:],
        cache,
        SimpleNamespace(prefill=prefill),
        torch.ones(()),
        output,
    )
    want = [naive(qi, latent, kv_b) for qi, latent in zip(q.split(news), latents)]
    torch.testing.assert_close(output.double(), torch.cat(want), atol=1e-5, rtol=1e-5)
