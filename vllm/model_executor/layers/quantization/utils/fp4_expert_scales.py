# SPDX-License-Identifier: Apache-2.0
"""Scales of four-bit experts, as ``fp4_scales`` has them for linear layers."""

from typing import TYPE_CHECKING

import torch

from vllm.distributed.eplb.eplb_state import EplbState
from vllm.model_executor.layers.fused_moe.expert_padding import clear_padding
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.quantization.utils.fp4_scales import (
    Fp4Format,
    check_block_scales,
    check_tensor_scale,
)
from vllm.model_executor.layers.quantization.utils.unloaded import mark_unloaded

if TYPE_CHECKING:
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts

__all__ = ["finish_expert_scales", "mark_expert_scales", "quantizes_activations"]

_W4A4_BACKENDS = {
    NvFp4MoeBackend.FLASHINFER_TRTLLM,
    NvFp4MoeBackend.FLASHINFER_CUTLASS,
    NvFp4MoeBackend.FLASHINFER_CUTEDSL,
    NvFp4MoeBackend.FLASHINFER_CUTEDSL_BATCHED,
    NvFp4MoeBackend.FLASHINFER_B12X,
    NvFp4MoeBackend.VLLM_CUTLASS,
    NvFp4MoeBackend.EMULATION,
}


def quantizes_activations(backend: NvFp4MoeBackend, weight_only: bool) -> bool:
    """Whether NVFP4 experts read their input scales; ``weight_only`` is what the config asks for."""
    return backend in _W4A4_BACKENDS and not weight_only


def mark_expert_scales(layer: "RoutedExperts", fmt: Fp4Format) -> None:
    """Mark every scale of freshly created experts as unloaded."""
    for bank in ("w13", "w2"):
        for name in ("weight_scale", *fmt.tensor_scales):
            mark_unloaded(getattr(layer, f"{bank}_{name}"))


def finish_expert_scales(layer: "RoutedExperts", fmt: Fp4Format, activations: bool = False) -> None:
    """Zero what pads the experts, and check that the rest of their scales was loaded.

    Called before anything is renamed or repacked. Input scales may be missing
    altogether (a weight-only file) unless activations are quantised; they may not be
    missing for some experts only.

    Args:
        layer: Experts with ``w{13,2}_weight`` (uint8, perhaps ``_packed``),
            ``w{13,2}_weight_scale`` and two tensor scales (float32) per bank if the
            format has any.
        fmt: Names of the scales.
        activations: Whether the backend quantises activations.

    Raises:
        ValueError: Naming the first tensor that is missing or useless, or the width
            when it cuts a block in two.
    """
    width = layer.moe_config.intermediate_size_per_partition_unpadded
    assert width is not None
    if width % fmt.block:
        raise ValueError(
            f"{layer.layer_name}: a rank's expert width {width} is no multiple of the "
            f"{fmt.name} block {fmt.block}, so ranks would share a block scale. Use a "
            "smaller tensor-parallel size or expert parallelism."
        )
    clear_padding(layer)
    for bank, shards in _banks(layer).items():
        for name in fmt.tensor_scales:
            _check_tensor_scales(layer, fmt, bank, shards, name, activations)
        codes = getattr(layer, f"{bank}_weight_scale").data.view(torch.uint8)
        if not fmt.holds_nan(codes):
            continue
        for expert, of_expert in enumerate(codes):
            for shard, part in zip(shards, of_expert.chunk(len(shards))):
                check_block_scales(part, _tensor_name(layer, expert, shard, "weight_scale"), fmt)


def _check_tensor_scales(
    layer: "RoutedExperts", fmt: Fp4Format, bank: str, shards: tuple[str, ...], name: str, activations: bool
) -> None:
    """Check a bank's tensor scales ``[experts, shards]``; of all experts, or of the rank's."""
    scale = getattr(layer, f"{bank}_{name}").data.view(-1, len(shards))
    of_input = name != fmt.tensor_scales[0]
    if of_input and not activations and bool(scale.isnan().all()):
        return
    way_out = ", or run the experts weight-only (without --moe-backend)" if of_input and activations else ""
    packed = getattr(layer, f"{bank}_weight_packed", None)
    weight = getattr(layer, f"{bank}_weight") if packed is None else packed
    for expert, shard in (~scale.isfinite() | (scale == 0)).nonzero().tolist():
        value = scale[expert, shard].item()
        # Some models zero experts that only fill up a rank and that no token reaches.
        if of_input or value != 0 or bool(weight[expert].any()):
            everywhere = len(scale) != layer.local_num_experts
            check_tensor_scale(value, _tensor_name(layer, expert, shards[shard], name, everywhere), way_out)
        scale[expert, shard] = 1.0


def _banks(layer: "RoutedExperts") -> dict[str, tuple[str, ...]]:
    return {"w13": ("w1", "w3") if layer.moe_config.is_act_and_mul else ("w1",), "w2": ("w2",)}


def _tensor_name(layer: "RoutedExperts", expert: int, shard: str, tensor: str, everywhere: bool = False) -> str:
    """Name a tensor as the file does: by logical expert, and by the file's word for the shard.

    Args:
        layer: The experts.
        expert: Index on this rank or, if ``everywhere``, over all ranks.
        shard: ``w1``, ``w2`` or ``w3``.
        tensor: Last part of the name.
        everywhere: See ``expert``.
    """
    config, local = layer.moe_config, layer._expert_map
    if local is not None and not everywhere:
        expert = int((local == expert).nonzero()[0])
    redundant = config.num_experts - config.num_logical_experts
    if redundant > 0:
        logical = EplbState.build_initial_global_physical_to_logical_map(config.num_logical_experts, redundant)
        expert = int(logical[expert])
    linear = {
        "w1": layer.ckpt_gate_proj_name,
        "w2": layer.ckpt_down_proj_name,
        "w3": layer.ckpt_up_proj_name,
    }[shard]
    return f"{layer.layer_name}.{expert}.{linear}.{tensor}"
