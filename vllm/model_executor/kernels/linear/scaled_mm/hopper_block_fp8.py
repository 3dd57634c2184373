# SPDX-License-Identifier: Apache-2.0
"""Block-scaled FP8 linear for Hopper: few tokens weight-only, more by CUTLASS."""

import torch

from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear.scaled_mm.block_fp8_few_tokens import (
    BLOCK,
    MAX_TOKENS,
    block_fp8_few_tokens,
    prepare_kernels,
)
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import (
    FP8ScaledMMLinearLayerConfig,
)
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    per_token_group_quant_fp8,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import direct_register_custom_op

from .cutlass import CutlassFp8BlockScaledMMKernel

__all__ = ["HopperFp8BlockScaledMMKernel"]


def _block_fp8_linear_sm90(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    if x.shape[0] <= MAX_TOKENS:
        return block_fp8_few_tokens(x, weight, scale)
    codes, factors = per_token_group_quant_fp8(
        x.contiguous(), BLOCK, column_major_scales=True, use_ue8m0=False
    )
    return ops.cutlass_scaled_mm(
        codes, weight.T, scale_a=factors, scale_b=scale.T, out_dtype=x.dtype
    )


def _shape_only(
    x: torch.Tensor, weight: torch.Tensor, scale: torch.Tensor
) -> torch.Tensor:
    return x.new_empty(x.shape[0], weight.shape[0])


# One operator, so that a compiled graph for any number of tokens holds the choice.
direct_register_custom_op(
    "block_fp8_linear_sm90",
    _block_fp8_linear_sm90,
    fake_impl=_shape_only,
)


class HopperFp8BlockScaledMMKernel(CutlassFp8BlockScaledMMKernel):
    """Up to 64 tokens one launch that leaves activations in BF16; CUTLASS above."""

    @classmethod
    def is_supported(
        cls, compute_capability: int | None = None
    ) -> tuple[bool, str | None]:
        if not (current_platform.is_cuda() and current_platform.is_device_capability(90)):
            return False, "requires compute capability 9.0"
        return super().is_supported(compute_capability)

    @classmethod
    def can_implement(
        cls, config: FP8ScaledMMLinearLayerConfig
    ) -> tuple[bool, str | None]:
        shape = config.weight_quant_key.scale.group_shape
        if (shape.row, shape.col) != (BLOCK, BLOCK):
            return False, f"requires blocks of 128x128, got {shape.row}x{shape.col}"
        if any(size % BLOCK for size in config.weight_shape):
            return False, f"requires whole blocks, got {config.weight_shape}"
        if config.input_dtype != torch.bfloat16:
            return False, f"requires bfloat16 activations, got {config.input_dtype}"
        return super().can_implement(config)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Weights stay as they are; kernels are compiled before a graph is captured."""
        prepare_kernels()

    def apply_weights(
        self,
        layer: torch.nn.Module,
        x: torch.Tensor,
        bias: torch.Tensor | None = None,
        **kwargs,
    ) -> torch.Tensor:
        y = torch.ops.vllm.block_fp8_linear_sm90(
            x.reshape(-1, x.shape[-1]), layer.weight, layer.weight_scale
        )
        y = y if bias is None else y + bias
        return y.view(*x.shape[:-1], y.shape[-1])
