# SPDX-License-Identifier: Apache-2.0
"""NVFP4 experts on CPU, read packed.

The packed codes, block scales and tensor scales are the only resident copy of
the weights; an expert is dequantised when tokens route to it, to the activation
dtype, and dropped again.
"""

from typing import TYPE_CHECKING

import torch

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
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

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

logger = init_logger(__name__)

__all__ = [
    "CPUNvFp4EmulationExperts",
    "CPUNvFp4Experts",
    "DIVISORS",
    "MULTIPLIERS",
    "SHARDS",
    "check_expert_scales",
    "expert_tensor_name",
    "mark_scales_unloaded",
    "unpadded_width",
]

# The tensor scales of weight and input, by dialect: ModelOpt's multiply,
# compressed-tensors' divide.
MULTIPLIERS = ("weight_scale_2", "input_scale")
DIVISORS = ("weight_global_scale", "input_global_scale")


class CPUNvFp4Experts(CPUTorchExperts):
    """W4A16: NVFP4 weights, activations as they come.

    ``quant_config.g1_alphas`` holds the tensor scales of gate and up, float32
    ``[experts, 2]`` (or ``[experts]`` when they share one), ``g2_alphas`` those of
    down, ``[experts]``. Gate and up are scaled apart before SiTU sees them.
    """

    @staticmethod
    def _supports_quant_scheme(
        weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        return weight_key == kNvfp4Static and activation_key in (None, kNvfp4Dynamic)

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts],
        moe_config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        width = moe_config.intermediate_size_per_partition
        if width % NVFP4_BLOCK:
            return False, (
                f"a rank's expert width {width} (of {moe_config.intermediate_size} at "
                f"tp_size {moe_config.tp_size}) is no multiple of the NVFP4 block "
                f"{NVFP4_BLOCK}; use a smaller tensor-parallel size or expert "
                "parallelism"
            )
        return CPUTorchExperts.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )

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

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Zero codes and block scales of the part that pads the per-rank width.

        The model may widen the experts beyond the file's width; nothing loads the
        extra part. Zero times an uninitialised scale may be NaN, so scales count.

        Raises:
            ValueError: The unpadded width cuts a block of 16 columns in two.
        """
        width = unpadded_width(layer, "NVFP4", NVFP4_BLOCK)
        padded = layer.w2_weight.shape[-1] * 2
        if width == padded:
            return
        for name in ("w13_weight", "w13_weight_scale"):
            rows = getattr(layer, name).data.view(torch.uint8).unflatten(1, (2, padded))
            rows[:, :, width:].zero_()
        for name, per_column in (("w2_weight", 2), ("w2_weight_scale", NVFP4_BLOCK)):
            columns = getattr(layer, name).data.view(torch.uint8)
            columns[..., width // per_column :].zero_()


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


_UNLOADED_E4M3 = 0x7F  # e4m3's NaN

SHARDS = {"w13": ("w1", "w3"), "w2": ("w2",)}


def unpadded_width(layer: "RoutedExperts", kind: str, block: int) -> int:
    """Return the part of a rank's expert width that the file fills.

    Raises:
        ValueError: It is no multiple of the format's block.
    """
    width = layer.moe_config.intermediate_size_per_partition_unpadded
    assert width is not None
    if width % block:
        raise ValueError(
            f"{layer.layer_name}: a rank's expert width {width} is no multiple of the "
            f"{kind} block {block}, so ranks would share a block scale. Use a "
            "smaller tensor-parallel size or expert parallelism."
        )
    return width


def mark_scales_unloaded(
    layer: "RoutedExperts", names: tuple[str, str] = MULTIPLIERS
) -> None:
    """Fill every scale of freshly created NVFP4 experts with NaN.

    What the checkpoint does not write stays NaN and is found by
    :func:`check_expert_scales`.
    """
    for bank in SHARDS:
        getattr(layer, f"{bank}_weight_scale").data.view(torch.uint8).fill_(
            _UNLOADED_E4M3
        )
        for name in names:
            getattr(layer, f"{bank}_{name}").data.fill_(float("nan"))


def check_expert_scales(
    layer: "RoutedExperts",
    activations: bool,
    names: tuple[str, str] = MULTIPLIERS,
) -> None:
    """Check the scales of loaded NVFP4 experts.

    Tensor scales must be finite and not zero. A block scale may be zero but not
    NaN. Input scales may be missing altogether (a weight-only file), unless
    activations are quantised; they may not be missing for some experts only.

    Args:
        layer: Experts with ``w{13,2}_weight_scale`` (e4m3) and two tensor scales
            (float32) per bank, as loaded.
        activations: Whether the backend quantises activations.
        names: What the dialect calls the tensor scales of weight and input.

    Raises:
        ValueError: Naming the first wrong or missing tensor, or the width when it
            cuts a block in two.
    """
    width = unpadded_width(layer, "NVFP4", NVFP4_BLOCK)
    for bank, shards in SHARDS.items():
        for name in names:
            scale = getattr(layer, f"{bank}_{name}").data.view(-1, len(shards))
            optional = name == names[1] and not activations
            if optional and bool(scale.isnan().all()):
                continue
            wrong = (~scale.isfinite() | (scale == 0)).nonzero()
            if len(wrong):
                expert, shard = wrong[0].tolist()
                found = scale[expert, shard].item()
                raise ValueError(
                    f"{expert_tensor_name(layer, expert, shards[shard], name)}: "
                    + ("missing" if found != found else f"found {found}")
                    + f", expected a finite factor other than 0 ({len(wrong)} such in "
                    "this layer). Re-export the checkpoint"
                    + (
                        ", or run the experts weight-only (without --moe-backend)."
                        if activations and name == names[1]
                        else "."
                    )
                )
        blocks = getattr(layer, f"{bank}_weight_scale").data.view(torch.uint8)
        for expert, codes in enumerate(blocks):
            if bank == "w13":
                parts = codes.view(2, -1, codes.shape[-1])[:, :width]
            else:
                parts = codes[None, :, : width // NVFP4_BLOCK]
            missing = ((parts & 0x7F) == _UNLOADED_E4M3).flatten(1).any(1)
            if bool(missing.any()):
                shard = shards[int(missing.int().argmax())]
                raise ValueError(
                    f"{expert_tensor_name(layer, expert, shard, 'weight_scale')}: missing or NaN, "
                    "expected one finite e4m3 scale per 16 columns. Re-export the "
                    "checkpoint."
                )


def expert_tensor_name(
    layer: "RoutedExperts", expert: int, shard: str, tensor: str
) -> str:
    """Name a tensor as the checkpoint does, with the global expert number."""
    local = layer.expert_map
    if local is not None:
        expert = int((local == expert).nonzero()[0])
    checkpoint = {
        "w1": layer.ckpt_gate_proj_name,
        "w2": layer.ckpt_down_proj_name,
        "w3": layer.ckpt_up_proj_name,
    }[shard]
    return f"{layer.layer_name}.{expert}.{checkpoint}.{tensor}"
