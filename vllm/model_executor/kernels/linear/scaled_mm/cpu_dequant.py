# SPDX-License-Identifier: Apache-2.0
"""Block-scaled FP8 linear on CPU in plain torch, weight-only."""

import torch
import torch.nn.functional as F

from vllm.model_executor.layers.quantization.utils.block_fp8_dequant import (
    dequantize_block_fp8,
)
from vllm.platforms import current_platform

from .BlockScaledMMLinearKernel import Fp8BlockScaledMMLinearKernel
from .ScaledMMLinearKernel import FP8ScaledMMLinearLayerConfig

__all__ = ["CPUFp8BlockDequantKernel"]


class CPUFp8BlockDequantKernel(Fp8BlockScaledMMLinearKernel):
    """Dequantise the weight to the activation dtype, then an ordinary GEMM.

    For hosts without AMX, and for float32, where the AMX kernel rounds to BF16.
    Weights stay in FP8 between calls; activations are not quantised.
    """

    apply_input_quant = False

    @classmethod
    def is_supported(
        cls, compute_capability: int | None = None
    ) -> tuple[bool, str | None]:
        if not current_platform.is_cpu():
            return False, "requires CPU"
        return True, None

    @classmethod
    def can_implement(
        cls, config: FP8ScaledMMLinearLayerConfig
    ) -> tuple[bool, str | None]:
        shape = config.weight_quant_key.scale.group_shape
        if shape.row != shape.col or shape.row <= 0:
            return False, f"requires square blocks, got {shape.row}x{shape.col}"
        return True, None

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing to pack: the weight is read as it is stored."""

    def apply_weights(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        weight = dequantize_block_fp8(
            layer.weight, layer.weight_scale, self.weight_group_shape.row, x.dtype
        )
        return F.linear(x, weight, bias)

    def apply_block_scaled_mm(
        self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
    ) -> torch.Tensor:
        raise NotImplementedError("apply_weights runs the whole layer")
