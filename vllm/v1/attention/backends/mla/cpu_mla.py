import torch

from vllm.utils.math_utils import cdiv
from vllm.v1.attention.backends.mla.cpu_mla import MLACommonMetadata
from vllm.v1.attention.backends.mla.prefill.cpu import context_lengths


# fork: extend
class CPUMLAImpl:
    # fork: add after forward_mqa
    def forward_mha(
        self,
        q: torch.Tensor,
        kv_c_normed: torch.Tensor,
        k_pe: torch.Tensor,
        kv_c_and_k_pe_cache: torch.Tensor,
        attn_metadata: MLACommonMetadata,
        k_scale: torch.Tensor,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
    ) -> None:
        """Prefill over context and new tokens in one pass.

        Args:
            q: ``[new tokens, heads, qk_dim]``.
            kv_c_normed: ``[new tokens, kv_lora_rank]``.
            k_pe: ``[new tokens, 1, rope]``.
            kv_c_and_k_pe_cache: ``[blocks, block size, kv_lora_rank + rope]``.
            attn_metadata: with ``prefill`` set.
            k_scale: unused, the CPU cache is not quantised.
            output: ``[new tokens, heads * v_dim]``, written in place.
            output_scale: must be None.
        """
        assert output_scale is None and attn_metadata.prefill is not None
        prefill = attn_metadata.prefill
        assert prefill.prefill_backend is not None
        new = torch.cat([kv_c_normed, k_pe.squeeze(1)], dim=-1)
        starts = prefill.query_start_loc.tolist()
        parts = []
        for table, start, stop, context in zip(
            prefill.block_table, starts, starts[1:], context_lengths(prefill)
        ):
            used = table[: cdiv(context, kv_c_and_k_pe_cache.shape[1])].long()
            old = kv_c_and_k_pe_cache[used].flatten(0, 1)[:context]
            parts += [old.to(new.dtype), new[start:stop]]
        latent = torch.cat(parts)
        kv = self.kv_b_proj(latent[:, : self.kv_lora_rank].contiguous())[0]
        kv = kv.view(-1, self.num_heads, self.qk_nope_head_dim + self.v_head_dim)
        k_nope, v = kv.split([self.qk_nope_head_dim, self.v_head_dim], dim=-1)
        k = self._concat_k_nope_k_pe(k_nope, latent[:, None, self.kv_lora_rank :])
        attended = prefill.prefill_backend.run_prefill_new_tokens(
            q, k, v, return_softmax_lse=False
        )
        assert isinstance(attended, torch.Tensor)  # no log-sum-exp was asked for
        output.copy_(attended.flatten(1))
