# SPDX-License-Identifier: Apache-2.0

import torch

from vllm.model_executor.layers.fused_moe.router.cpu_topk import topk_with_bias
from vllm.platforms import current_platform


# fork: edit 93c8ef4daafa
def fused_topk_bias(
    gating_output: torch.Tensor,
    scoring_func: str,
    e_score_correction_bias: torch.Tensor,
    topk: int,
    renormalize: bool,
    indices_type: torch.dtype | None = None,
    hash_indices_table: torch.Tensor | None = None,
    routed_scaling_factor: float = 1.0,
):
    # fork: at start
    if current_platform.is_cpu() and hash_indices_table is None:
        return topk_with_bias(
            gating_output,
            e_score_correction_bias,
            topk,
            scoring_func,
            renormalize,
            routed_scaling_factor,
            indices_type,
        )
