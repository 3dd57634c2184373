# SPDX-License-Identifier: Apache-2.0

import torch


# fork: extend
class CpuCommunicator:
    # Data-parallel ranks bring different numbers of tokens to the experts.
    # fork: add after all_gather
    def all_gatherv(
        self,
        input_: torch.Tensor | list[torch.Tensor],
        dim: int = 0,
        sizes: list[int] | None = None,
    ) -> torch.Tensor | list[torch.Tensor]:
        """Concatenate the ranks' tensors of different lengths.

        Args:
            input_: A tensor, or several, ``[n, ...]``.
            dim: 0.
            sizes: Each rank's n; None if all have this rank's.
        """
        if not isinstance(input_, torch.Tensor):
            return [self.all_gatherv(tensor, dim, sizes) for tensor in input_]
        assert dim == 0, "only rows can be gathered"
        rows = sizes or [input_.shape[0]] * self.world_size
        # Gloo gathers equal shapes only.
        mine = input_.new_zeros(max(rows), *input_.shape[1:])
        mine[: input_.shape[0]] = input_
        parts = [torch.empty_like(mine) for _ in rows]
        torch.distributed.all_gather(parts, mine, group=self.device_group)
        return torch.cat([part[:n] for part, n in zip(parts, rows)])

    # fork: add after all_gatherv
    def reduce_scatterv(
        self, input_: torch.Tensor, dim: int = -1, sizes: list[int] | None = None
    ) -> torch.Tensor:
        """Sum over ranks and return this rank's rows.

        Args:
            input_: ``[sum of sizes, ...]``.
            dim: 0.
            sizes: Rows per rank; None divides them evenly.
        """
        assert dim == 0, "only rows can be scattered"
        total = input_.contiguous().clone()
        torch.distributed.all_reduce(total, group=self.device_group)
        rows = sizes or [total.shape[0] // self.world_size] * self.world_size
        return total.split(rows)[self.rank_in_group].contiguous()
