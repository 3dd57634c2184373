# SPDX-License-Identifier: Apache-2.0
"""NVFP4 linear on CPU in plain torch, weight-only (W4A16)."""

import torch
import torch.nn.functional as F

from vllm.model_executor.layers.quantization.utils.nvfp4_dequant import (
    dequantize_nvfp4,
)
from vllm.platforms import current_platform

from .base import NvFp4LinearKernel, NvFp4LinearLayerConfig

__all__ = ["CPUNvFp4LinearKernel", "check_linear_scales", "mark_linear_unloaded"]

_E4M3_NAN = 0x7F

# ModelOpt's names of the tensor scales of weight and input.
_MULTIPLIERS = ("weight_scale_2", "input_scale")


class CPUNvFp4LinearKernel(NvFp4LinearKernel):
    """Dequantise the weight to the activation dtype, then an ordinary GEMM.

    The packed weight stays the only resident copy. Shards of a fused layer keep
    their own tensor scales.
    """

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
        """Spread the shards' tensor scales over rows, unless they are equal.

        Reads ``layer.weight_shard_scale`` float32 ``[shards]`` where a method has
        kept it, else the common ``layer.weight_global_scale``.
        """
        scale = getattr(layer, "weight_shard_scale", None)
        if scale is None:
            scale = layer.weight_global_scale.data.reshape(1)
        if bool((scale == scale[0]).all()):
            layer.weight_row_scale = scale[0].float()
        else:
            widths = torch.tensor(layer.logical_widths)
            layer.weight_row_scale = scale.float().repeat_interleave(widths)[:, None]

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


def mark_linear_unloaded(
    layer: torch.nn.Module, names: tuple[str, ...] = _MULTIPLIERS
) -> None:
    """Fill the scales of a freshly created NVFP4 linear layer with NaN."""
    layer.weight_scale.data.view(torch.uint8).fill_(_E4M3_NAN)
    for name in names:
        getattr(layer, name).data.fill_(float("nan"))


def check_linear_scales(
    layer: torch.nn.Module,
    activations: bool,
    names: tuple[str, ...] = _MULTIPLIERS,
) -> None:
    """Check the scales of a loaded NVFP4 linear layer, and keep one per shard.

    Sets ``layer.weight_shard_scale`` (float32 ``[shards]``).

    Args:
        layer: Layer with ``weight_scale`` (e4m3) and tensor scales (float32
            ``[shards]``).
        activations: Whether the kernel quantises activations.
        names: Tensor scales: the weight's and, unless the layer has none, the input's.

    Raises:
        ValueError: A tensor scale is missing, zero, NaN or infinite, or a block
            scale is missing or NaN.
    """
    for name in names:
        scale = getattr(layer, name).data.reshape(-1)
        if name != names[0] and not activations and bool(scale.isnan().all()):
            continue
        for shard, value in enumerate(scale.tolist()):
            if value == 0 or value != value or abs(value) == float("inf"):
                found = "missing" if value != value else f"found {value}"
                raise ValueError(
                    f"{layer.prefix}.{name} (shard {shard}): {found}, expected a finite "
                    "factor other than 0. Re-export the checkpoint."
                )
    codes = layer.weight_scale.data.view(torch.uint8)
    if bool(((codes & 0x7F) == _E4M3_NAN).any()):
        raise ValueError(
            f"{layer.prefix}.weight_scale: missing or NaN, expected one finite e4m3 "
            "scale per 16 columns. Re-export the checkpoint."
        )
    layer.weight_shard_scale = getattr(layer, names[0]).data.clone()
