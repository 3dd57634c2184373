# SPDX-License-Identifier: Apache-2.0
"""KDA attention metadata on the CPU platform."""

from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import (
    GDNAttentionBackend,
    GDNAttentionMetadata,
    GDNAttentionMetadataBuilder,
)


class CPUKDAMetadataBuilder(GDNAttentionMetadataBuilder):
    """Says for every request, decodes included, whether it has a state yet.

    A prompt of one token counts as a decode. Its block was never written by
    this request, and nothing clears recurrent blocks on reuse, so without the
    flag it would start from another request's final state.
    """

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        *args,
        **kwargs,
    ) -> GDNAttentionMetadata:
        metadata = super().build(
            common_prefix_len, common_attn_metadata, *args, **kwargs
        )
        metadata.has_initial_state = (
            common_attn_metadata.compute_num_computed_tokens() > 0
        )
        return metadata


class CPUKDABackend(GDNAttentionBackend):
    """Recurrent-state backend whose kernels are ``kda.kda_forward``."""

    @staticmethod
    def get_name() -> str:
        return "CPU_KDA"

    @staticmethod
    def get_builder_cls() -> type[CPUKDAMetadataBuilder]:
        return CPUKDAMetadataBuilder
