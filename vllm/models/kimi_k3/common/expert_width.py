# SPDX-License-Identifier: Apache-2.0
"""How wide a rank's experts are, in the checkpoint and in memory."""

from dataclasses import dataclass

from vllm.config import get_current_vllm_config
from vllm.distributed import (
    get_dp_group,
    get_pcp_group,
    get_tensor_model_parallel_world_size,
)

__all__ = ["ExpertWidth", "expert_width", "rank_expert_width"]


@dataclass(frozen=True)
class ExpertWidth:
    """The experts' intermediate size, in columns.

    Attributes:
        logical: what the checkpoint fills on each rank.
        physical: what each rank allocates.
        ranks: how many ranks share an expert.
    """

    logical: int
    physical: int
    ranks: int

    @property
    def padded(self) -> bool:
        return self.physical > self.logical

    @property
    def total(self) -> int:
        """What the experts are created with, who divide it by the ranks again."""
        return self.physical * self.ranks


def expert_width(
    intermediate_size: int,
    tp_size: int,
    dp_size: int = 1,
    expert_parallel: bool = False,
    minimum: int = 256,
) -> ExpertWidth:
    """Split the experts' intermediate size over ranks.

    Without expert parallelism the data-parallel ranks shard the experts like
    tensor-parallel ones. With it, an expert stays whole on its rank.

    Args:
        intermediate_size: width of an expert in the checkpoint.
        tp_size: tensor-parallel ranks.
        dp_size: data-parallel ranks, times those of prefill context parallelism.
        expert_parallel: whether ranks hold whole experts.
        minimum: least width per rank of the expert kernels; narrower shares are
            padded to it.

    Raises:
        ValueError: the ranks cannot have equal shares; rounding down would drop
            the columns that are left over.
    """
    ranks = 1 if expert_parallel else tp_size * dp_size
    if intermediate_size % ranks:
        raise ValueError(
            f"moe_intermediate_size {intermediate_size} is no multiple of the "
            f"{ranks} ranks that share an expert (tensor parallel {tp_size}, data "
            f"parallel {dp_size}). Choose sizes whose product divides it, or "
            "--enable-expert-parallel."
        )
    logical = intermediate_size // ranks
    physical = max(logical, minimum) if ranks > 1 else logical
    return ExpertWidth(logical, physical, ranks)


def rank_expert_width(intermediate_size: int, minimum: int) -> ExpertWidth:
    """:func:`expert_width` under the parallel configuration of this process.

    Raises:
        ValueError: as there, or expert load balancing is asked for.
    """
    parallel = get_current_vllm_config().parallel_config
    if parallel.enable_eplb:
        # The model creates no redundant experts and registers none for balancing.
        raise ValueError(
            "Kimi K3 does not support expert parallelism load balancing (EPLB): it "
            "would have no effect, redundant experts included. Remove --enable-eplb."
        )
    return expert_width(
        intermediate_size,
        get_tensor_model_parallel_world_size(),
        get_dp_group().world_size * get_pcp_group().world_size,
        parallel.enable_expert_parallel,
        minimum,
    )
