# SPDX-License-Identifier: Apache-2.0
"""MXFP4 experts on CPU, read packed.

As for NVFP4 (``cpu_nvfp4_moe``), codes and block scales are the only resident copy
of the weights.
"""

import torch

from vllm.model_executor.layers.fused_moe.experts.cpu_torch_moe import CPUTorchExperts
from vllm.model_executor.layers.quantization.utils.mxfp4_dequant import (
    MXFP4_BLOCK,
    dequantize_mxfp4,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kMxfp4Static,
)

__all__ = ["CPUMxfp4Experts"]


class CPUMxfp4Experts(CPUTorchExperts):
    """W4A16: MXFP4 weights, activations as they come."""

    weight_format, block = "MXFP4", MXFP4_BLOCK

    @staticmethod
    def _supports_quant_scheme(
        weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        return weight_key == kMxfp4Static and activation_key is None

    def expert_w13(
        self, w1: torch.Tensor, expert: int, dtype: torch.dtype
    ) -> torch.Tensor:
        assert self.w1_scale is not None
        return dequantize_mxfp4(w1[expert], self.w1_scale[expert], dtype)

    def expert_w2(
        self, w2: torch.Tensor, expert: int, dtype: torch.dtype
    ) -> torch.Tensor:
        assert self.w2_scale is not None
        return dequantize_mxfp4(w2[expert], self.w2_scale[expert], dtype)
