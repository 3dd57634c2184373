# SPDX-License-Identifier: Apache-2.0
"""Scales of four-bit weights: marked before loading, checked after it, on every platform.

A tensor scale must be finite and not zero. A block scale may be zero but not NaN.
What a file lacks is an error that names the tensor; where the user lets it through
(``vllm/checkpoint/strictness.py``), a scale that is missing or no number counts as 1.
"""

from dataclasses import dataclass

import torch

from vllm.checkpoint.strictness import refuse
from vllm.model_executor.kernels.linear import NvFp4LinearKernel
from vllm.model_executor.layers.quantization.utils.modelopt_names import shards_of
from vllm.model_executor.layers.quantization.utils.mxfp4_dequant import (
    E8M0_NAN,
    MXFP4_BLOCK,
)
from vllm.model_executor.layers.quantization.utils.nvfp4_tensor_scale import (
    share_shard_tensor_scale,
)
from vllm.model_executor.layers.quantization.utils.unloaded import mark_unloaded

__all__ = [
    "MXFP4",
    "NVFP4_COMPRESSED",
    "NVFP4_MODELOPT",
    "Fp4Format",
    "finish_linear_scales",
    "mark_linear_scales",
]


@dataclass(frozen=True)
class Fp4Format:
    """A four-bit format, and what a producer calls its scales.

    Attributes:
        name: For messages.
        block: Columns of a block.
        nan: Code of a block scale's NaN, without sign.
        one: Code of the block scale 1.
        tensor_scales: Tensor scales of weight and input; none if there are only blocks.
        divisors: Whether values are divided by the tensor scales.
    """

    name: str
    block: int
    nan: int
    one: int
    tensor_scales: tuple[str, ...] = ()
    divisors: bool = False

    def holds_nan(self, codes: torch.Tensor) -> bool:
        """Whether uint8 codes of block scales hold a NaN; one reduction if they do not."""
        # Finite positive codes are the smaller ones; a negative one is looked at again.
        return bool(codes.numel()) and int(codes.max()) >= self.nan and bool(self.is_nan(codes).any())

    def is_nan(self, codes: torch.Tensor) -> torch.Tensor:
        return (codes & self.nan) == self.nan


NVFP4_MODELOPT = Fp4Format("NVFP4", 16, 0x7F, 0x38, ("weight_scale_2", "input_scale"))
NVFP4_COMPRESSED = Fp4Format("NVFP4", 16, 0x7F, 0x38, ("weight_global_scale", "input_global_scale"), True)
MXFP4 = Fp4Format("MXFP4", MXFP4_BLOCK, E8M0_NAN, 127)


def check_tensor_scale(value: float, name: str, way_out: str = "") -> bool:
    """Refuse a tensor scale that scales nothing.

    Args:
        value: As loaded, NaN where nothing was.
        name: As the file names it.
        way_out: Another one than a new export.

    Returns:
        Whether the value is usable.
    """
    if value == value and value != 0 and abs(value) != float("inf"):
        return True
    found = "missing or NaN" if value != value else f"found {value}"
    refuse(f"{name}: {found}, expected a finite factor other than 0. Re-export the checkpoint{way_out}.")
    return False


def check_block_scales(codes: torch.Tensor, name: str, fmt: Fp4Format) -> None:
    """Refuse block scales (uint8 codes of one tensor) of which any is NaN, as unloaded ones are."""
    if fmt.holds_nan(codes):
        refuse(
            f"{name}: missing or NaN, expected one finite scale per {fmt.block} columns "
            f"({fmt.name}). Re-export the checkpoint."
        )
        codes[fmt.is_nan(codes)] = fmt.one


# ---- linear layers -----------------------------------------------------------


def mark_linear_scales(layer: torch.nn.Module, fmt: Fp4Format) -> None:
    """Mark every scale of a freshly created linear layer as unloaded."""
    for name in ("weight_scale", *fmt.tensor_scales):
        if hasattr(layer, name):
            mark_unloaded(getattr(layer, name))


def finish_linear_scales(layer: torch.nn.Module, fmt: Fp4Format, kernel: NvFp4LinearKernel) -> None:
    """Check the scales of a loaded linear layer, and make its shards share one tensor scale.

    Called before anything is renamed or repacked. A kernel with
    ``scales_shards_apart`` gets the multipliers as ``layer.weight_shard_scale``
    (float32 ``[shards]``); for others the shards' block scales are re-expressed.
    A kernel without ``quantizes_input`` needs no input scale. A shard behind those that
    the file has, zeroed by the model, only widens the output and stays zero. Shards
    that are one tensor in the file have one scale between them.

    Args:
        layer: Layer with ``weight`` or ``weight_packed`` (uint8), ``weight_scale``
            (e4m3) and tensor scales (float32 ``[shards]``).
        fmt: Names of the scales.
        kernel: What will run the layer.

    Raises:
        ValueError: Naming the tensor that is missing, zero, NaN or infinite.
    """
    names = [name for name in fmt.tensor_scales if hasattr(layer, name)]
    scales = {name: getattr(layer, name).data.view(-1) for name in names}
    widths = list(layer.logical_widths)
    packed = getattr(layer, "weight_packed", None)
    weights = (layer.weight if packed is None else packed).data.split(widths)
    blocks = layer.weight_scale.data.view(torch.uint8).split(widths)
    shards = _shards(layer)
    widening = {
        shard
        for shard in range(len(shards), len(widths))
        if shards and bool(fmt.is_nan(blocks[shard]).all()) and not bool(weights[shard].any())
    }
    for shard, block_scales in enumerate(blocks):
        if shard in widening:
            block_scales.zero_()
        check_block_scales(block_scales, f"{_shard_name(layer, shard)}.weight_scale", fmt)
    of_each = len(shards) == len(widths) - len(widening)
    for name, scale in scales.items():
        optional = name != names[0] and not kernel.quantizes_input
        if optional and bool(scale.isnan().all()):
            continue
        values = scale.tolist()
        for shard, value in enumerate(values):
            if value != value and shard and (shard in widening or not of_each):
                scale[shard] = scale[shard - 1]
            elif not check_tensor_scale(value, f"{_shard_name(layer, shard)}.{name}"):
                scale[shard] = 1.0
    weight = scales[names[0]]
    factors = 1.0 / weight.double() if fmt.divisors else weight.double()
    if kernel.scales_shards_apart:
        layer.weight_shard_scale = factors.float()
        return
    share_shard_tensor_scale(_name(layer), layer.weight_scale.data, factors, widths)
    weight.fill_(weight.min() if fmt.divisors else weight.max())
    if fmt.divisors and len(names) > 1:
        # All shards read one input: the largest scale, as for multipliers.
        scales[names[1]].fill_(scales[names[1]].min())


def _name(layer: torch.nn.Module) -> str:
    return getattr(layer, "prefix", "lm_head")  # the only linear that does not know its name


def _shards(layer: torch.nn.Module) -> list[str]:
    """The modules of a fused layer as the file names them, where the layer's config says so."""
    return shards_of(_name(layer), getattr(layer.quant_config, "packed_modules_mapping", {}))


def _shard_name(layer: torch.nn.Module, shard: int) -> str:
    shards = _shards(layer)
    if len(layer.logical_widths) == 1:
        return _name(layer)
    return shards[shard] if shard < len(shards) else f"{_name(layer)} (shard {shard})"
