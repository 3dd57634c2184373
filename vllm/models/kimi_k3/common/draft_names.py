# SPDX-License-Identifier: Apache-2.0
"""Tensors of a draft (MTP) layer that are neither fused nor an expert's."""

import regex as re
import torch

from vllm.models.kimi_k3.common.cache_scales import cache_scale_name

__all__ = ["draft_parameter_name"]

# Mixes of earlier blocks, which a draft layer is built without.
_UNUSED = re.compile(r"\.(self_attention|mlp)_res_(norm|proj)\.")


def draft_parameter_name(name: str, params: dict[str, torch.Tensor]) -> str | None:
    """Return the draft model's parameter for a tensor, or None if it needs none.

    Args:
        name: The tensor, renamed to where the draft model has it.
        params: The draft model's parameters by name.

    Raises:
        ValueError: No parameter takes the tensor. A scale that nobody takes would
            leave quantised codes to be read as values.
    """
    target = cache_scale_name(name, params)
    if target is None or target in params:
        return target
    if _UNUSED.search(name):
        return None
    raise ValueError(
        f"{name}: the checkpoint has this tensor, and the draft (MTP) model has no "
        "parameter for it. If it is a scale, the quantisation config does not list its "
        "layer: correct `quantized_layers` or `ignore`, or start without "
        "--speculative-config."
    )
