# SPDX-License-Identifier: Apache-2.0
"""Block-scaled FP8 linears of compressed-tensors files."""

from collections.abc import Callable
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationStrategy, QuantizationType

from vllm.model_executor.layers.linear import (
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization.block_fp8_linear import (
    BLOCK,
    BlockFp8LinearMethod,
)

__all__ = ["CompressedTensorsBlockFp8LinearMethod", "is_block_fp8"]


def is_block_fp8(scheme: dict[str, Any] | None) -> bool:
    """Whether a scheme is e4m3 with one scale per 128x128 block of the weight."""
    weights = scheme.get("weights") if scheme else None
    if scheme is None or weights is None:
        return False
    inputs = scheme.get("input_activations")
    return (
        weights.type == QuantizationType.FLOAT
        and weights.num_bits == 8
        and weights.strategy == QuantizationStrategy.BLOCK
        and list(weights.block_structure or ()) == [BLOCK, BLOCK]
        and weights.symmetric
        and (inputs is None or bool(inputs.dynamic))
    )


@register_weight_loader_v2_supported_method
class CompressedTensorsBlockFp8LinearMethod(BlockFp8LinearMethod):
    """The same layout as FP8_PB_WO: ``weight`` and ``weight_scale``, a multiplier.

    The scale has rank 2 and may be stored in the model's dtype.
    """

    def create_weights(self, layer: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        super().create_weights(layer, *args, **kwargs)
        scale = layer.weight_scale
        scale.weight_loader = _widen(scale.weight_loader)


def _widen(upstream: Callable) -> Callable:
    """Read a 16-bit scale as the float32 number that it is."""

    def load(param: Any, loaded: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        if loaded.dtype in (torch.bfloat16, torch.float16):
            loaded = loaded.float()
        upstream(param, loaded, *args, **kwargs)

    return load
