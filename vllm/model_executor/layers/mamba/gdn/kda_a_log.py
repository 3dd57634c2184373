# SPDX-License-Identifier: Apache-2.0
"""Loading KDA's ``A_log`` from files that hold more values than there are heads."""

from collections.abc import Callable

import torch

from vllm.distributed import get_tensor_model_parallel_world_size

__all__ = ["checked_a_log_loader"]


def checked_a_log_loader(load: Callable[[torch.Tensor, torch.Tensor], None]) -> Callable:
    """Wrap a loader that takes a rank's heads and drops what is behind the last one.

    The published Kimi K3 file holds 128 values for 96 heads, the rest being zero. The
    parameter's ``tensor_name``, where it has one, goes into the message.

    Raises:
        ValueError: From the wrapped loader, if the file has fewer values than heads, or
            one behind the last head that is not zero.
    """

    def loader(param: torch.Tensor, loaded_weight: torch.Tensor) -> None:
        heads = param.numel() * get_tensor_model_parallel_world_size()
        values = loaded_weight.flatten()
        wrong = values[heads:].nonzero().flatten()
        if len(values) < heads or len(wrong):
            found = f"{len(values)} values"
            if len(wrong):
                place = heads + int(wrong[0])
                found += f", of which number {place} is {values[place].item():g}"
            raise ValueError(
                f"{getattr(param, 'tensor_name', 'A_log')}: expected one value for each of "
                f"{heads} heads and zeros behind them, found {found}. Check "
                "linear_attn_config.num_heads against the checkpoint."
            )
        load(param, loaded_weight)

    return loader
