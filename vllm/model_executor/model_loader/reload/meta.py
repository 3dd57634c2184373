# SPDX-License-Identifier: Apache-2.0

import torch

from vllm.model_executor.layers.quantization.utils.unloaded import is_marked, mark_unloaded


# fork: edit 2393dd64100f
def materialize_meta_tensor(meta_tensor: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    # fork: before return
    # What the first load would have noticed, a reload notices too.
    if is_marked(tensor):
        mark_unloaded(tensor)
