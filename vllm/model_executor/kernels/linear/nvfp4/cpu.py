# SPDX-License-Identifier: Apache-2.0
"""NVFP4 linear on CPU in plain torch, weight-only (W4A16)."""

import torch
import torch.nn.functional as F

from vllm.model_executor.layers.quantization.utils.nvfp4_dequant import (
    dequantize_nvfp4,
)
from vllm.platforms import current_platform

from .base import NvFp4LinearKernel, NvFp4LinearLayerConfig

__all__ = ["CPUNvFp4LinearKernel"]


class CPUNvFp4LinearKernel(NvFp4LinearKernel):
    """Dequantise the weight to the activation dtype, then an ordinary GEMM.

    The packed weight stays the only resident copy. Shards of a fused layer keep
    their own tensor scales.
    """

    quantizes_input = False
    scales_shards_apart = True

    @classmethod
    def is_supported(
        cls, compute_capability: int | None = None
    ) -> tuple[bool, str | None]:
        if not current_platform.is_cpu():
            return False, "requires CPU"
        return True, None

    @classmethod
    def can_implement(cls, config: NvFp4LinearLayerConfig) -> tuple[bool, str | None]:
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Spread the tensor scales of ``layer.weight_shard_scale`` over rows, unless they are equal."""
        scale = layer.weight_shard_scale
        if bool((scale == scale[0]).all()):
            layer.weight_row_scale = scale[0]
        else:
            widths = torch.tensor(layer.logical_widths)
            layer.weight_row_scale = scale.repeat_interleave(widths)[:, None]

    def apply_weights(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        weight = dequantize_nvfp4(
            layer.weight.data, layer.weight_scale.data, layer.weight_row_scale, x.dtype
        )
        return F.linear(x, weight, bias)
