# SPDX-License-Identifier: Apache-2.0
"""MXFP4 experts on CPU, read packed.

As for NVFP4 (``cpu_nvfp4_moe``), codes and block scales are the only resident copy
of the weights.
"""

import torch

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
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

    @staticmethod
    def _supports_quant_scheme(
        weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        return weight_key == kMxfp4Static and activation_key is None

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts],
        moe_config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        width = moe_config.intermediate_size_per_partition
        if width % MXFP4_BLOCK:
            return False, (
                f"a rank's expert width {width} (of {moe_config.intermediate_size} at "
                f"tp_size {moe_config.tp_size}) is no multiple of the MXFP4 block "
                f"{MXFP4_BLOCK}; use a smaller tensor-parallel size or expert "
                "parallelism"
            )
        return CPUTorchExperts.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )

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
