# SPDX-License-Identifier: Apache-2.0
"""Scales of a quantised KV cache, from the checkpoint's names to the model's."""

import regex as re
import torch

from vllm.model_executor.model_loader.weight_utils import maybe_remap_kv_scale_name

__all__ = ["cache_scale_name"]

# Where a layer's attention keeps them, under `self_attn`: MLA of the portable class
# wraps it twice, that of the GPU class is the attention itself.
_HOLDERS = (".mla_attn.mla_attn", "")


def cache_scale_name(name: str, params: dict[str, torch.Tensor]) -> str | None:
    """Return the parameter that a tensor of the checkpoint is for.

    Exporters hang the scale on a projection (``self_attn.k_proj.k_scale``) or on the
    attention (``self_attn.k_scale``).

    Args:
        name: The tensor, under the model's prefix.
        params: The model's parameters by name.

    Returns:
        A name in `params` for a cache scale; whatever upstream makes of any other
        tensor.

    Raises:
        ValueError: A cache scale that no layer takes, so that 1 would be used in its
            place.
    """
    found = re.fullmatch(r"(.+\.self_attn)(\.\w+)?\.([qkv]_scale)", name)
    if found is None or name in params:
        return maybe_remap_kv_scale_name(name, params)
    for holder in _HOLDERS:
        target = f"{found[1]}{holder}.{found[3]}"
        if target in params:
            return target
    raise ValueError(
        f"{name}: the checkpoint has a scale for the KV cache, and {found[1]} takes "
        "none, since the quantisation config leaves the cache as it is or the layer "
        "has no such cache. Expected `kv_cache_quant_algo` to be FP8 and the scale on "
        "an MLA layer; correct the config, or re-export the checkpoint."
    )
