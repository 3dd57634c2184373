# SPDX-License-Identifier: Apache-2.0

import torch

from vllm.model_executor.layers.fused_moe.router.cpu_topk import topk_with_bias
from vllm.platforms import current_platform


# fork: edit db4fd5442374
def fused_topk(
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    indices_type: torch.dtype | None = None,
    scoring_func: str = "softmax",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    # fork: at start
    if current_platform.is_cpu():
        weights, ids = topk_with_bias(
            gating_output,
            None,
            topk,
            scoring_func,
            renormalize,
            indices_dtype=indices_type,
        )
        # The third value is scratch of the fused op; no caller on CPU reads it.
        return weights, ids, torch.empty_like(ids)
