# SPDX-License-Identifier: Apache-2.0
"""Which tensors a compressed-tensors config quantises."""

from collections.abc import Mapping
from typing import Any

from vllm.checkpoint.fused_modules import fused_modules_in
from vllm.checkpoint.tensors import TensorSpec
from vllm.model_executor.layers.quantization.compressed_tensors.names import find_target

__all__ = ["layouts"]

_FAMILIES = ("kda", "mla", "dense", "shared", "expert")
_NATIVE = "mxfp4-pack-quantized"


def _layout(group: Mapping[str, Any]) -> str:
    """Our name of a group's weight layout, or the library's words for another one."""
    weights = group.get("weights") or {}
    key = tuple(weights.get(k) for k in ("type", "num_bits", "strategy"))
    size = weights.get("group_size")
    if key == ("float", 4, "tensor_group") and size == 16:
        return "NVFP4"
    if key == ("float", 4, "group") and size == 32:
        return "MXFP4"
    if key == ("float", 8, "block") and list(weights.get("block_structure") or ()) == [128, 128]:
        return "FP8_BLOCK"
    return f"{key[0]}{key[1]} per {key[2]}"


def layouts(specs: Mapping[str, TensorSpec], quant: Mapping[str, Any]) -> dict[str, str]:
    """Weight name -> layout, of the quantised weights.

    Args:
        specs: Unquantised tensors of the checkpoint by name.
        quant: ``quantization_config`` whose method is compressed-tensors or mxfp4.

    Raises:
        ValueError: Shards of a fused module are treated differently, or a native MXFP4
            file leaves experts out or quantises other linears, which the engine's MXFP4
            method takes no notice of.
    """
    linears = {
        name: name.removesuffix(".weight")
        for name, spec in specs.items()
        if len(spec.shape) == 2 and name.endswith(".weight")
    }
    experts = [name for name in linears if specs[name].kind.startswith("expert.")]
    if quant.get("quant_method") == "mxfp4":
        return dict.fromkeys(experts, "MXFP4")
    groups = (quant.get("config_groups") or {}).values()
    schemes = {target: group for group in groups for target in group.get("targets") or ()}
    ignore = tuple(quant.get("ignore") or ())

    found = {}
    for name, module in linears.items():
        # By class vLLM quantises these; the others are no linears of its own, or have
        # no quantisation config.
        family = specs[name].kind.partition(".")[0]
        target = find_target(module, "Linear" if family in _FAMILIES else "", schemes, ignore, {})
        if target is not None:
            found[name] = _layout(schemes[target])
    for name, fused in fused_modules_in(linears.values()).items():
        find_target(name, "Linear", schemes, ignore, {fused.name: fused.shards})
    if quant.get("format") == _NATIVE:
        left_out = [name for name in experts if name not in found]
        others = [name for name in found if name not in experts]
        if left_out or others:
            name = (left_out or others)[0]
            says = "leaves out" if left_out else "quantises"
            raise ValueError(
                f"quantization_config of format {_NATIVE} {says} {name}, but MXFP4 files are served with all routed "
                "experts quantised and nothing else. Name each group's own format and 'mixed-precision' at the top."
            )
    return found
