# SPDX-License-Identifier: Apache-2.0

import torch


# fork: extend
class FusedMoEKernelModularImpl:
    # fork: edit a86a89c15ce4
    def _allocate_buffers(
        self,
        device: torch.device,
        workspace_dtype: torch.dtype,
        workspace13_shape: tuple[int, ...],
        workspace2_shape: tuple[int, ...],
        fused_out_shape: tuple[int, ...],
    ):
        # fork: before max_shape_size
        if device.type == "cpu":
            # The workspace manager shares buffers between captured graphs and
            # empties accelerator caches; a CPU worker has neither.
            return tuple(
                torch.empty(shape, dtype=workspace_dtype)
                for shape in (workspace13_shape, workspace2_shape, fused_out_shape)
            )
