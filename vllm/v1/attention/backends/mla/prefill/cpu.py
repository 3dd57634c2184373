# SPDX-License-Identifier: Apache-2.0
"""MLA prefill on the CPU platform: one dense causal attention per request."""

from typing import ClassVar

import torch

from vllm.v1.attention.backends.mla.prefill.base import MLAPrefillBackend


def causal_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float
) -> torch.Tensor:
    """Attend from the last rows of a sequence to all of it.

    Args:
        q: ``[queries, heads, qk_dim]``, the sequence's last tokens.
        k: ``[tokens, heads, qk_dim]``, ``tokens >= queries``.
        v: ``[tokens, heads, v_dim]``.
        scale: factor on the scores.

    Returns:
        ``[queries, heads, v_dim]`` in the dtype of ``q``.
    """
    visible = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
    visible = visible.tril(len(k) - len(q))
    out = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(0, 1).unsqueeze(0) for x in (q, k, v)),
        attn_mask=visible,
        scale=scale,
    )
    return out[0].transpose(0, 1)


class CPUMLAPrefillBackend(MLAPrefillBackend):
    """Takes each request's keys whole, context first: no partial softmax."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [
        torch.float16,
        torch.bfloat16,
        torch.float32,
    ]

    @staticmethod
    def get_name() -> str:
        return "CPU"

    def run_prefill_new_tokens(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        return_softmax_lse: bool,
        out: torch.Tensor | None = None,
        output_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend within each request of the prepared prefill batch.

        Args:
            q: ``[new tokens, heads, qk_dim]``, requests one after another.
            k: ``[context + new tokens, heads, qk_dim]``, each request's context
                before its new tokens.
            v: ``[context + new tokens, heads, v_dim]``.
            return_softmax_lse: must be False.
            out: must be None.
            output_scale: must be None.

        Returns:
            ``[new tokens, heads, v_dim]``.
        """
        assert not return_softmax_lse and out is None and output_scale is None
        starts = self._prefill_metadata.query_start_loc.tolist()
        contexts = context_lengths(self._prefill_metadata)
        outputs, first_key = [], 0
        for start, stop, context in zip(starts, starts[1:], contexts):
            keys = slice(first_key, first_key + context + stop - start)
            outputs.append(causal_attention(q[start:stop], k[keys], v[keys], self.scale))
            first_key = keys.stop
        return torch.cat(outputs)

    def run_prefill_context_chunk(self, chunk, q, k, v, out=None):
        raise NotImplementedError(
            "The CPU MLA prefill attends to context and new tokens in one pass "
            "(CPUMLAImpl.forward_mha); it has no partial results to merge."
        )


def context_lengths(prefill_metadata) -> list[int]:
    """Tokens of each prefill request that are in the KV cache already."""
    if prefill_metadata.chunked_context is None:
        return [0] * (len(prefill_metadata.query_start_loc) - 1)
    return prefill_metadata.chunked_context.context_lens_list
