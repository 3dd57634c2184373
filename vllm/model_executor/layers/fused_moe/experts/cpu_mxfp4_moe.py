# SPDX-License-Identifier: Apache-2.0
"""MXFP4 experts on CPU, read packed.

As for NVFP4 (``cpu_nvfp4_moe``), codes and block scales are the only resident copy
of the weights.
"""

from typing import TYPE_CHECKING

import torch

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
from vllm.model_executor.layers.fused_moe.experts.cpu_nvfp4_moe import (
    SHARDS,
    expert_tensor_name,
    unpadded_width,
)
from vllm.model_executor.layers.fused_moe.experts.cpu_torch_moe import CPUTorchExperts
from vllm.model_executor.layers.quantization.utils.mxfp4_dequant import (
    E8M0_NAN,
    MXFP4_BLOCK,
    dequantize_mxfp4,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kMxfp4Static,
)

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

__all__ = ["CPUMxfp4Experts", "finish_mxfp4_experts", "mark_mxfp4_unloaded"]


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


def mark_mxfp4_unloaded(layer: "RoutedExperts") -> None:
    """Fill the scales of freshly created MXFP4 experts with e8m0's NaN."""
    for bank in SHARDS:
        getattr(layer, f"{bank}_weight_scale").data.fill_(E8M0_NAN)


def finish_mxfp4_experts(layer: "RoutedExperts") -> None:
    """Zero what pads the per-rank width, and check that the rest was loaded.

    Raises:
        ValueError: Naming the first tensor that is missing or NaN, or the width when
            it cuts a block in two.
    """
    width = unpadded_width(layer, "MXFP4", MXFP4_BLOCK)
    padded = layer.w2_weight.shape[-1] * 2
    for name in ("w13_weight", "w13_weight_scale"):
        getattr(layer, name).data.unflatten(1, (2, padded))[:, :, width:].zero_()
    for name, per_column in (("w2_weight", 2), ("w2_weight_scale", MXFP4_BLOCK)):
        getattr(layer, name).data[..., width // per_column :].zero_()
    for bank, shards in SHARDS.items():
        scale = getattr(layer, f"{bank}_weight_scale").data
        missing = (scale == E8M0_NAN).unflatten(1, (len(shards), -1)).flatten(2).any(2)
        if bool(missing.any()):
            expert, shard = missing.nonzero()[0].tolist()
            raise ValueError(
                f"{expert_tensor_name(layer, expert, shards[shard], 'weight_scale')}: "
                "missing or NaN, expected one finite e8m0 scale per "
                f"{MXFP4_BLOCK} columns. Re-export the checkpoint."
            )
