# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors' formats for Kimi K3, written by compressed-tensors itself.

Scales, codes and packing come from that library (a runtime dependency of vLLM), so
that what we read back was not also written by us. Three layouts:

- NVFP4 experts, as in the published W4A4 file: ``weight_packed`` uint8 ``[out, in/2]``
  (low nibble = even column), ``weight_scale`` e4m3 ``[out, in/16]``,
  ``weight_global_scale`` f32 ``[1]``, a *divisor*, and ``input_global_scale`` f32
  ``[1]``, a divisor too;
- MXFP4 experts, as in the native file: ``weight_packed`` and ``weight_scale`` uint8
  ``[out, in/32]`` (e8m0: the exponent plus 127), no other scale;
- block FP8 attention: ``weight`` e4m3 ``[out, in]`` and ``weight_scale`` f32
  ``[ceil(out/128), ceil(in/128)]``, a multiplier.

What is not named is unquantised.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

from vllm.checkpoint.modelopt import check_ratio, expert_tensor_scale
from vllm.checkpoint.tensors import TensorSpec

__all__ = ["CompressedTensorsEncoder", "algorithm", "block_fp8", "quantization_config"]

# Our name of a layout -> (the library's preset, its name of the format on disk).
_LAYOUTS = {
    "NVFP4": ("NVFP4", "nvfp4-pack-quantized"),
    "MXFP4": ("MXFP4A16", "mxfp4-pack-quantized"),
    "FP8_BLOCK": ("FP8_BLOCK", "float-quantized"),
}

_EXPERTS = r"re:.*\.experts\.\d+\.w[123]$"
_ATTENTION = r"re:.*\.self_attn\.\w+_(proj|with_mqa)$"

# Linears outside attention and routed experts, as published files name them.
_REST = (
    r"re:.*lm_head",
    r"re:.*\.mlp\.(gate|up|gate_up|down)_proj$",
    r"re:.*\.block_sparse_moe\.gate$",
    r"re:.*\.routed_expert_(down|up)_proj$",
    r"re:.*_res_proj$",
)
_VISION = (r"re:vision_tower.*", r"re:mm_projector.*")


def algorithm(kind: str, experts: str | None, attention: str | None) -> str | None:
    """Layout of a tensor by its `TensorSpec.kind`; None stays BF16 or F32."""
    family, _, module = kind.partition(".")
    if family == "expert":
        return experts
    if family in ("kda", "mla") and module.endswith(("_proj", "_with_mqa")):
        return attention
    return None


def quantization_config(
    specs: Mapping[str, TensorSpec], experts: str | None, attention: str | None
) -> dict[str, Any]:
    """``quantization_config`` in the library's own form.

    One layout targets every ``Linear`` and ignores the others, attention and shared
    experts module by module, as the published files do. Two layouts have a group each,
    with a regular expression for its modules.

    Args:
        specs: Unquantised tensors of the checkpoint by name.
        experts: ``"NVFP4"``, ``"MXFP4"`` or None.
        attention: ``"FP8_BLOCK"`` or None.
    """
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

    layouts = {name: target for name, target in ((experts, _EXPERTS), (attention, _ATTENTION)) if name}
    groups = {}
    for number, (name, target) in enumerate(layouts.items()):
        scheme = _scheme(name)
        fields = scheme.model_dump() | {
            "targets": ["Linear"] if len(layouts) == 1 else [target],
            "format": _LAYOUTS[name][1],
        }
        groups[f"group_{number}"] = QuantizationScheme(**fields)
    ignore = list(_REST)
    if any(spec.kind.startswith("vision.") for spec in specs.values()):
        ignore += _VISION
    named = [
        name.removesuffix(".weight")
        for name, spec in specs.items()
        if name.endswith(".weight")
        and len(spec.shape) == 2
        and (spec.kind.startswith("shared.") or (not attention and spec.kind.startswith(("kda.", "mla."))))
    ]
    if not experts:
        ignore.append(_EXPERTS)
    config = QuantizationConfig(
        config_groups=groups,
        format=_LAYOUTS[next(iter(layouts))][1] if len(layouts) == 1 else "mixed-precision",
        quantization_status="compressed",
        ignore=named + ignore,
    )
    return config.model_dump(mode="json")


def _scheme(layout: str) -> Any:
    from compressed_tensors.quantization import preset_name_to_scheme

    return preset_name_to_scheme(_LAYOUTS[layout][0], ["Linear"])


class CompressedTensorsEncoder:
    """Turns unquantised tensors into the stored ones.

    The NVFP4 tensor scales are the reciprocals of those of the ModelOpt writer, powers
    of two shared by w1 and w3, so that both dialects of one seed hold the same experts.

    Args:
        experts: ``"NVFP4"``, ``"MXFP4"`` or None.
        attention: ``"FP8_BLOCK"`` or None.
        w3_scale_ratio: Tensor scale of w3 over that of w1, NVFP4 only.

    Raises:
        ValueError: The ratio is not positive.
    """

    def __init__(self, experts: str | None, attention: str | None, w3_scale_ratio: float = 1.0) -> None:
        check_ratio(w3_scale_ratio)
        self.experts, self.attention = experts, attention
        self.ratio = w3_scale_ratio

    def __call__(self, name: str, spec: TensorSpec, source: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Stored tensors of the unquantised tensor `name`, see the module docstring.

        Raises:
            ValueError: An expert whose input width is no multiple of the group size.
        """
        algo = algorithm(spec.kind, self.experts, self.attention)
        if algo is None:
            return {name: source(name)}
        weight = source(name).float()
        # The library compiles its rounding, which needs a C++ compiler.
        with torch.compiler.set_stance("force_eager"):
            stored = block_fp8(weight) if algo == "FP8_BLOCK" else self._fp4(name, algo, weight, source)
        prefix = name.removesuffix("weight")
        return {prefix + key: value.contiguous() for key, value in stored.items()}

    def _fp4(
        self, name: str, algo: str, weight: torch.Tensor, source: Callable[[str], torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        from compressed_tensors.compressors import BaseCompressor
        from compressed_tensors.quantization.utils import calculate_qparams

        scheme = _scheme(algo)
        group = scheme.weights.group_size
        if weight.shape[1] % group:
            raise ValueError(f"{name}: {weight.shape[1]} columns are no multiple of {group}.")
        scales = {}
        if algo == "NVFP4":
            scales["weight_global_scale"] = torch.tensor([1.0 / expert_tensor_scale(name, source, self.ratio)])
            scales["input_global_scale"] = torch.tensor([1.0])
        blocks = weight.unflatten(1, (-1, group))
        scales["weight_scale"], _ = calculate_qparams(
            blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=scales.get("weight_global_scale")
        )
        compressor = BaseCompressor.get_value_from_registry(_LAYOUTS[algo][1])
        return compressor.compress({"weight": weight, **scales}, scheme)


def block_fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """``weight`` e4m3 and ``weight_scale`` float32 of a float32 ``[out, in]``, 128x128 blocks.

    The last blocks may be partial. Its caller keeps torch from compiling.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.utils import calculate_qparams, maybe_pad_tensor_for_block_quant

    scheme = _scheme("FP8_BLOCK")
    rows, columns = scheme.weights.block_structure
    padded = maybe_pad_tensor_for_block_quant(weight, (rows, columns))
    blocks = padded.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    scale, _ = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), scheme.weights)
    compressor = BaseCompressor.get_value_from_registry(_LAYOUTS["FP8_BLOCK"][1])
    return compressor.compress({"weight": weight, "weight_scale": scale}, scheme)
