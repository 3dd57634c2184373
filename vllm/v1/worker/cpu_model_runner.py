import torch

from vllm.v1.kv_cache_interface import AttentionSpec


# fork: extend
class CPUModelRunner:
    # fork: replace 3be806eb8680
    def _zero_block_ids(self, block_ids: list[int]) -> None:
        """Zero newly allocated attention blocks.

        The scheduler counts in blocks of the cache spec; the tensors are cut
        into kernel blocks, ``ratio`` of which make one. Recurrent layers need
        no clearing: they know which requests have a state.
        """
        contexts = self.compilation_config.static_forward_context
        seen: set[int] = set()
        for group in self._kv_cache_spec_attn_group_iterator():
            spec, index = group.kv_cache_spec, group.kv_cache_group_id
            if not isinstance(spec, AttentionSpec) or index >= len(
                self._kernel_block_sizes
            ):
                continue
            kernel_size = self._kernel_block_sizes[index]
            ratio = spec.block_size // kernel_size
            block_dim = group.backend.get_kv_cache_block_dim(
                kernel_size,
                spec.num_kv_heads,
                spec.head_size,
                cache_dtype_str=self.cache_config.cache_dtype,
            )
            first = torch.tensor(block_ids, dtype=torch.int64) * ratio
            rows = (first.unsqueeze(1) + torch.arange(ratio)).flatten()
            for name in group.layer_names:
                kv = contexts[name].kv_cache if name in contexts else None
                if not isinstance(kv, torch.Tensor) or kv.data_ptr() in seen:
                    continue
                seen.add(kv.data_ptr())
                kv.index_fill_(block_dim, rows, 0)
