# SPDX-License-Identifier: Apache-2.0

import torch

from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import (
    scales_gate_and_up_apart,
)
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.block_fp8_linear import (
    BlockFp8LinearMethod,
)
from vllm.model_executor.layers.quantization.modelopt import (
    ModelOptKVCacheMethod,
    QuantizeMethodBase,
)
from vllm.model_executor.layers.quantization.utils.fp4_expert_scales import (
    finish_expert_scales,
    mark_expert_scales,
    quantizes_activations,
)
from vllm.model_executor.layers.quantization.utils.fp4_scales import (
    NVFP4_MODELOPT,
    finish_linear_scales,
    mark_linear_scales,
)
from vllm.model_executor.layers.quantization.utils.modelopt_names import (
    canonical_table,
    check_algo,
    find_algo,
    is_excluded,
    map_patterns,
)
from vllm.model_executor.layers.quantization.utils.nvfp4_tensor_scale import (
    share_w13_tensor_scale,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.platforms import current_platform


# fork: replace 43e80910b753
class ModelOptFp8PbWoLinearMethod(BlockFp8LinearMethod):
    """FP8_PB_WO: e4m3 weights with one float32 scale per 128×128 block."""


# fork: extend
class ModelOptFp8Config:
    def has_blocked_weights(self) -> bool:
        return self.quant_method == "FP8_PB_WO"


# fork: extend
class ModelOptNvFp4Config:
    # fork: edit 3e2146a332a3
    def get_supported_act_dtypes(self, upstream) -> list[torch.dtype]:
        # fork: instead-of return
        return [*upstream, torch.float32] if current_platform.is_cpu() else upstream


# fork: extend
class ModelOptNvFp4LinearMethod:
    # fork: edit 254da3e74722
    def create_weights(self, layer: torch.nn.Module):
        # fork: at end
        mark_linear_scales(layer, NVFP4_MODELOPT)

    # fork: edit d1fb6bdc44f3
    def process_weights_after_loading(self, layer: torch.nn.Module, upstream) -> None:
        # fork: at start
        finish_linear_scales(layer, NVFP4_MODELOPT, self.kernel)
        # fork: instead-of if
        # What a kernel does not read need not agree.
        if self.kernel.quantizes_input and torch.unique(layer.input_scale).numel() != 1:
            ...


# fork: extend
class ModelOptNvFp4W4A16LinearMethod:
    # fork: edit 8c09a01a7c82
    def create_weights(self, layer: torch.nn.Module):
        # fork: at end
        mark_linear_scales(layer, NVFP4_MODELOPT)

    # fork: edit 9579521fe675
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        # fork: drop if[2]
        # fork: at start
        finish_linear_scales(layer, NVFP4_MODELOPT, self.kernel)


# fork: extend
class ModelOptNvFp4FusedMoE:
    # fork: edit 4fd49f1da2e9
    def create_weights(self, layer: RoutedExperts):
        # fork: at end
        mark_expert_scales(layer, NVFP4_MODELOPT)

    # fork: edit a64fb9015251
    def process_weights_after_loading(
        self, layer: RoutedExperts, w13_weight_scale_2: torch.Tensor, upstream
    ) -> None:
        # fork: at start
        activations = quantizes_activations(self.nvfp4_backend, self.use_a16)
        finish_expert_scales(layer, NVFP4_MODELOPT, activations)
        # fork: drop if
        # fork: instead-of w13_weight_scale_2
        if scales_gate_and_up_apart(self.nvfp4_backend):
            w13_weight_scale_2 = layer.w13_weight_scale_2
        elif self.moe.is_act_and_mul:
            w13_weight_scale_2 = share_w13_tensor_scale(
                layer.layer_name, layer.w13_weight_scale.data, layer.w13_weight_scale_2
            )
        else:
            w13_weight_scale_2 = upstream


# fork: extend
class ModelOptMixedPrecisionConfig:
    # fork: edit bdd666cf7e4f
    def get_supported_act_dtypes(self, upstream) -> list[torch.dtype]:
        # fork: instead-of return
        return [*upstream, torch.float32] if current_platform.is_cpu() else upstream

    # fork: edit 0e219ad83665
    def _from_config(cls, quantized_layers, exclude_modules, original_config):
        # fork: before fp8_config
        for name, algo in canonical_table(quantized_layers).items():
            check_algo(name, algo)
        # config.json may call them `ignore`, which upstream reads, or
        # `exclude_modules`, as hf_quant_config.json does.
        exclude_modules = [
            *exclude_modules,
            *(original_config.get("exclude_modules") or ()),
        ]

    # fork: add after _from_config
    def is_layer_excluded(self, prefix: str) -> bool:
        return is_excluded(prefix, self.exclude_modules, self.packed_modules_mapping)

    # fork: add after is_layer_excluded
    def canonical_layers(self) -> dict[str, str]:
        """Canonical module name → algorithm, for the current ``quantized_layers``."""
        if getattr(self, "_canonical_of", None) is not self.quantized_layers:
            self._canonical_of = self.quantized_layers
            self._canonical = canonical_table(self.quantized_layers)
        return self._canonical

    # fork: add after canonical_layers
    def has_blocked_weights(self) -> bool:
        """Asked by VllmConfig, which then enables the fused activation quantiser."""
        return "FP8_PB_WO" in self.canonical_layers().values()

    # fork: edit e09b0db4fd8a
    def _resolve_quant_algo(self, prefix: str) -> str | None:
        # fork: at start
        algo = find_algo(prefix, self.canonical_layers(), self.packed_modules_mapping)
        if algo is not None:
            return algo

    # fork: edit 536f8531894d
    def get_quant_method(
        self, layer: torch.nn.Module, prefix: str, quant_algo: str | None
    ) -> QuantizeMethodBase | None:
        # An MLA layer is no `Attention`, and has a cache too. On GPUs its name is that
        # of its projections' parent, whose algorithm is not for the cache.
        # fork: instead-of if[0]
        if isinstance(layer, AttentionLayerBase):
            return ModelOptKVCacheMethod(self) if self.kv_cache_quant_method else None
        # fork: after quant_algo
        if quant_algo is not None:
            for cls, kind in (
                (LinearBase, "linear layer"),
                (ParallelLMHead, "lm_head"),
                (RoutedExperts, "bank of experts"),
            ):
                if isinstance(layer, cls):
                    check_algo(prefix, quant_algo, kind)
            if quant_algo == "FP8_PB_WO" and isinstance(layer, LinearBase):
                return ModelOptFp8PbWoLinearMethod(self.fp8_config)

    # fork: edit c9dcb6e82e45
    def apply_vllm_mapper(self, hf_to_vllm_mapper):
        # fork: instead-of call super().apply_vllm_mapper
        self.exclude_modules = map_patterns(
            self.exclude_modules, hf_to_vllm_mapper._map_name
        )
