# SPDX-License-Identifier: Apache-2.0
"""NVIDIA's mixed format for Kimi K3: NVFP4 experts, FP8_PB_WO attention, rest BF16.

The bytes come from nvidia-modelopt's own quantisers, so that what we read back was not
also written by us. Layout and config follow the published ``nvidia/Kimi-K3-NVFP4``:

- experts: ``weight`` uint8 ``[out, in/2]`` (low nibble = even column), ``weight_scale``
  e4m3 ``[out, in/16]``, ``weight_scale_2`` f32 scalar (multiplier, a power of two, equal
  for w1 and w3 of one expert), ``input_scale`` f32 scalar 1.0;
- attention: ``weight`` e4m3 ``[out, in]``, ``weight_scale`` f32
  ``[ceil(out/128), 1, ceil(in/128), 1]``, the last blocks partial where sizes ask for it.
"""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from vllm.checkpoint.fused_modules import fused_modules
from vllm.checkpoint.tensors import TEXT_PREFIX, TensorSpec

__all__ = [
    "ModelOptEncoder",
    "ModelOptMissing",
    "algorithm",
    "check_ratio",
    "expert_tensor_scale",
    "quantization_config",
]

GROUP_SIZE = 16
BLOCK = 128
E2M1_MAX, E4M3_MAX = 6.0, 448.0

# Unquantised modules, as wildcards over module names.
_EXCLUDED = (
    "*embed_tokens*",
    "*lm_head*",
    "*norm*",
    "*_res_proj*",
    "*q_conv1d*",
    "*k_conv1d*",
    "*v_conv1d*",
    "*.block_sparse_moe.gate",
    "*.routed_expert_down_proj",
    "*.routed_expert_up_proj",
    "*.shared_experts*",
)
_EXCLUDED_VISION = ("vision_tower*", "mm_projector*")


class ModelOptMissing(ImportError):
    """nvidia-modelopt is not installed; the message says how to get it."""


def algorithm(kind: str, attention: str | None = "FP8_PB_WO") -> str | None:
    """Algorithm of a tensor by its `TensorSpec.kind`; None stays BF16 or F32."""
    family, _, module = kind.partition(".")
    if family == "expert":
        return "NVFP4"
    if family in ("kda", "mla") and module.endswith(("_proj", "_with_mqa")):
        return attention
    return None


def _quantisers() -> tuple[Any, Any]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns about other optional packages
            from modelopt.torch.quantization.qtensor import FP8QTensor, NVFP4QTensor
    except ImportError as error:
        raise ModelOptMissing(
            f"quantised formats need nvidia-modelopt ({error}); install it with pip install 'vllm[quantize]'."
        ) from error
    return NVFP4QTensor, FP8QTensor


def power_of_two_scale(amax: float) -> float:
    """Smallest power of two that maps `amax` to at most 448 · 6.

    Raises:
        ValueError: `amax` is zero or not finite.
    """
    if not math.isfinite(amax) or amax <= 0:
        raise ValueError(f"a tensor with amax {amax} has no tensor scale.")
    return 2.0 ** math.ceil(math.log2(amax / (E2M1_MAX * E4M3_MAX)))


def check_ratio(w3_scale_ratio: float) -> None:
    """Raise ValueError unless the ratio of two tensor scales is one."""
    if not (math.isfinite(w3_scale_ratio) and w3_scale_ratio > 0):
        raise ValueError(f"w3_scale_ratio is {w3_scale_ratio}; it must be > 0.")


def expert_tensor_scale(name: str, source: Callable[[str], torch.Tensor], w3_scale_ratio: float) -> float:
    """NVFP4 tensor scale (multiplier) of one expert's weight.

    A power of two that covers the weight's amax, for w1 and w3 the pair's.

    Args:
        name: Name of the unquantised weight.
        source: Gives unquantised weights by name.
        w3_scale_ratio: Scale of w3 over that of w1.
    """
    expert, _, part = name.removesuffix(".weight").rpartition(".")
    if part == "w2":
        return power_of_two_scale(source(name).abs().max().item())
    amax = max(source(f"{expert}.{w}.weight").abs().max().item() for w in ("w1", "w3"))
    # Whichever half has the smaller scale still covers the pair's amax.
    w1 = power_of_two_scale(amax) * max(1.0, 1.0 / w3_scale_ratio)
    return w1 if part == "w1" else w1 * w3_scale_ratio


def quantization_config(
    specs: Mapping[str, TensorSpec], attention: str | None = "FP8_PB_WO"
) -> dict[str, Any]:
    """``quantization_config`` of ``config.json`` in the published layout.

    Routed experts have one key per bank, repeated under the spellings that loaders look
    for: ``mlp`` for ``block_sparse_moe`` and the roots ``language_model.model.``,
    ``model.`` and none. Attention has one key per linear plus those of fused modules.

    Args:
        specs: Unquantised tensors of the checkpoint by name.
        attention: Algorithm of the attention linears; None excludes them.
    """
    layers: dict[str, dict[str, Any]] = {}
    for name, spec in specs.items():
        algo = algorithm(spec.kind, attention)
        module = name.removesuffix(".weight")
        if algo == "NVFP4":
            info = {"quant_algo": algo, "group_size": GROUP_SIZE}
            for bank in _bank_names(module[: module.index(".experts.")] + ".experts"):
                layers.setdefault(bank, info)
        elif algo == "FP8_PB_WO":
            layers[module] = {"quant_algo": algo}
            parent, _, last = module.rpartition(".")
            for fused in fused_modules():  # listed beside their shards in the published config
                if last == fused.shards[0] and all(f"{parent}.{shard}.weight" in specs for shard in fused.shards):
                    layers[f"{parent}.{fused.name}"] = {"quant_algo": algo}
    dense = {name[: name.index(".mlp.")] + ".mlp*" for name, spec in specs.items() if spec.kind.startswith("dense.")}
    vision = any(spec.kind.startswith("vision.") for spec in specs.values())
    excluded = {*_EXCLUDED, *dense, *(_EXCLUDED_VISION if vision else ())}
    if attention is None:
        excluded.add("*.self_attn.*")
    return {
        "quant_method": "modelopt_mixed",
        "quant_algo": "MIXED_PRECISION",
        "kv_cache_quant_algo": None,
        "group_size": GROUP_SIZE,
        "exclude_modules": sorted(excluded),
        "quantized_layers": layers,
    }


def _bank_names(bank: str) -> Iterable[str]:
    inner = bank.removeprefix(TEXT_PREFIX).removeprefix("model.")
    yield bank
    for root in (TEXT_PREFIX + "model.", "model.", ""):
        for spelling in ("block_sparse_moe", "mlp"):
            yield root + inner.replace("block_sparse_moe", spelling)


class ModelOptEncoder:
    """Turns unquantised tensors into the stored ones.

    Args:
        w3_scale_ratio: ``weight_scale_2`` of w3 over that of w1. The published file
            has 1; loaders must also cope with others.
        attention: Algorithm of the attention linears; None leaves them BF16.

    Raises:
        ModelOptMissing: nvidia-modelopt cannot be imported.
        ValueError: The ratio is not positive.
    """

    def __init__(self, w3_scale_ratio: float = 1.0, attention: str | None = "FP8_PB_WO") -> None:
        check_ratio(w3_scale_ratio)
        self.ratio, self.attention = w3_scale_ratio, attention
        self.nvfp4, self.fp8 = _quantisers()

    def __call__(self, name: str, spec: TensorSpec, source: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Stored tensors of the unquantised tensor `name`, see the module docstring.

        Raises:
            ValueError: An expert whose input width is no multiple of 16.
        """
        algo = algorithm(spec.kind, self.attention)
        if algo is None:
            return {name: source(name)}
        prefix = name.removesuffix("weight")
        if algo == "NVFP4":
            stored = self._expert(name, spec, source)
        else:
            stored = self._attention(source(name))
        return {prefix + key: value.contiguous() for key, value in stored.items()}

    def _expert(self, name: str, spec: TensorSpec, source: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        if spec.shape[1] % GROUP_SIZE:
            raise ValueError(f"{name}: {spec.shape[1]} columns are no multiple of {GROUP_SIZE}.")
        weight = source(name).float()
        scale = expert_tensor_scale(name, source, self.ratio)
        tensor, block_scale, _ = self.nvfp4.quantize(weight, GROUP_SIZE, weights_scaling_factor_2=torch.tensor(scale))
        return {
            "weight": tensor._quantized_data,
            "weight_scale": block_scale,
            "weight_scale_2": torch.tensor(scale),
            "input_scale": torch.tensor(1.0),
        }

    def _attention(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        tensor, scale = self.fp8.quantize(weight.float(), block_sizes={-2: BLOCK, -1: BLOCK})
        rows, columns = (math.ceil(n / BLOCK) for n in weight.shape)
        return {
            "weight": tensor._quantized_data,
            "weight_scale": scale.float().reshape(rows, 1, columns, 1),
        }
