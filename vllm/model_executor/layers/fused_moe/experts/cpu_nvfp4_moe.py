# SPDX-License-Identifier: Apache-2.0
"""NVFP4 experts on CPU, read packed.

The packed codes, block scales and tensor scales are the only resident copy of
the weights; an expert is dequantised when tokens route to it, to the activation
dtype, and dropped again.
"""

import torch

from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEQuantConfig,
)
from vllm.model_executor.layers.fused_moe.experts.cpu_torch_moe import CPUTorchExperts
from vllm.model_executor.layers.quantization.utils.nvfp4_dequant import (
    NVFP4_BLOCK,
    dequantize_nvfp4,
)
from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import (
    ref_nvfp4_quant_dequant,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kNvfp4Dynamic,
    kNvfp4Static,
)

logger = init_logger(__name__)

__all__ = ["CPUNvFp4EmulationExperts", "CPUNvFp4Experts"]


class CPUNvFp4Experts(CPUTorchExperts):
    """W4A16: NVFP4 weights, activations as they come.

    ``quant_config.g1_alphas`` holds the tensor scales of gate and up, float32
    ``[experts, 2]`` (or ``[experts]`` when they share one), ``g2_alphas`` those of
    down, ``[experts]``. Gate and up are scaled apart before SiTU sees them.
    """

    weight_format, block = "NVFP4", NVFP4_BLOCK

    @staticmethod
    def _supports_quant_scheme(
        weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        return weight_key == kNvfp4Static and activation_key in (None, kNvfp4Dynamic)

    def expert_w13(
        self, w1: torch.Tensor, expert: int, dtype: torch.dtype
    ) -> torch.Tensor:
        assert self.w1_scale is not None and self.g1_alphas is not None
        scale = self.g1_alphas[expert].float()
        if scale.numel() == 2:
            scale = scale.repeat_interleave(w1.shape[1] // 2).unsqueeze(-1)
        return dequantize_nvfp4(w1[expert], self.w1_scale[expert], scale, dtype)

    def expert_w2(
        self, w2: torch.Tensor, expert: int, dtype: torch.dtype
    ) -> torch.Tensor:
        assert self.w2_scale is not None and self.g2_alphas is not None
        scale = self.g2_alphas[expert].float()
        return dequantize_nvfp4(w2[expert], self.w2_scale[expert], scale, dtype)


class CPUNvFp4EmulationExperts(CPUNvFp4Experts):
    """W4A4 emulation: activations are rounded to NVFP4 before each GEMM.

    ``a1_gscale`` and ``a2_gscale`` are reciprocals of the input scales, one scalar
    for all experts.
    """

    def __init__(
        self, moe_config: FusedMoEConfig, quant_config: FusedMoEQuantConfig
    ) -> None:
        super().__init__(moe_config, quant_config)
        logger.warning_once(
            "NVFP4 experts run as W4A4 emulation on CPU: activations are rounded to "
            "NVFP4 in plain torch. Leave out --moe-backend to run them weight-only."
        )

    @staticmethod
    def _supports_quant_scheme(
        weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        return (weight_key, activation_key) == (kNvfp4Static, kNvfp4Dynamic)

    def gemm_input(self, x: torch.Tensor, gscale: torch.Tensor | None) -> torch.Tensor:
        assert gscale is not None
        return ref_nvfp4_quant_dequant(x, gscale, block_size=NVFP4_BLOCK)
