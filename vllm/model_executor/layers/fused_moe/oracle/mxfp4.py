# SPDX-License-Identifier: Apache-2.0

import torch

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEQuantConfig,
    nvfp4_w4a16_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.experts.nvfp4_situ_sm90 import (
    Mxfp4SituSm90Experts,
    pack_nvfp4_situ_sm90,
)
from vllm.model_executor.layers.fused_moe.experts.nvfp4_situ_sm90_layout import (
    mxfp4_as_nvfp4,
)
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import (
    FusedMoEConfig,
    RoutedExperts,
    _return_or_raise,
)
from vllm.model_executor.layers.fused_moe.situ import check_situ_config
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static
from vllm.platforms import current_platform


# fork: extend
class Mxfp4MoeBackend:
    SITU_SM90 = "SITU_SM90"


# fork: edit bc93995c68bc
def backend_to_kernel_cls(
    backend: Mxfp4MoeBackend,
    upstream,
) -> list[type[mk.FusedMoEExperts]]:
    # fork: at start
    if backend == Mxfp4MoeBackend.SITU_SM90:
        return [Mxfp4SituSm90Experts]
    # The AMX kernel knows neither SiTU nor float32.
    # fork: instead-of return[-2]
    from vllm.model_executor.layers.fused_moe.experts.cpu_mxfp4_moe import (
        CPUMxfp4Experts,
    )

    return [*upstream, CPUMxfp4Experts]


# fork: edit 086b1db1fba8
def map_mxfp4_backend(mapping) -> list[Mxfp4MoeBackend]:
    # fork: after mapping
    mapping["situ_sm90"] = [Mxfp4MoeBackend.SITU_SM90]


# fork: edit 3d2840e3709e
def _get_priority_backends(upstream) -> list[Mxfp4MoeBackend]:
    # fork: instead-of return[-1]
    backends = list(upstream)
    backends.insert(backends.index(Mxfp4MoeBackend.MARLIN), Mxfp4MoeBackend.SITU_SM90)
    return backends


# fork: edit a7f3eaaa0516
def mxfp4_round_up_hidden_size_and_intermediate_size(
    backend: Mxfp4MoeBackend, hidden_size: int, intermediate_size: int
) -> tuple[int, int]:
    # fork: at start
    if backend == Mxfp4MoeBackend.SITU_SM90:
        return hidden_size, intermediate_size  # packing pads the width


# fork: edit f0598d4f4757
def select_deepseek_v4_mxfp4_moe_backend(
    config: FusedMoEConfig, activation_format, runner_backend
) -> tuple[Mxfp4MoeBackend, type[mk.FusedMoEExperts] | None]:
    # fork: at start
    check_situ_config(config, "MXFP4")
    # fork: after runner_backend
    if current_platform.is_cpu() and runner_backend == "auto":
        return _return_or_raise(
            Mxfp4MoeBackend.CPU, config, kMxfp4Static, None, activation_format
        )


# fork: edit 324df4b5aefe
def convert_weight_to_mxfp4_moe_kernel_format(
    mxfp4_backend: Mxfp4MoeBackend,
    w13_weight: torch.Tensor,
    w2_weight: torch.Tensor,
    w13_weight_scale: torch.Tensor,
    w2_weight_scale: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    layer: RoutedExperts,
):
    # fork: at start
    if mxfp4_backend == Mxfp4MoeBackend.SITU_SM90:
        w13_scale, w13_alpha = mxfp4_as_nvfp4(w13_weight, w13_weight_scale, halves=2)
        w2_scale, w2_alpha = mxfp4_as_nvfp4(w2_weight, w2_weight_scale, halves=1)
        w13, w13_scale, w13_alpha, w2, w2_scale, w2_alpha = pack_nvfp4_situ_sm90(
            w13_weight, w13_scale, w13_alpha, w2_weight, w2_scale, w2_alpha
        )
        # Parameters of the layer, so that moving an expert moves them.
        for name, alpha in (("w13", w13_alpha), ("w2", w2_alpha)):
            param = torch.nn.Parameter(alpha, requires_grad=False)
            layer.register_parameter(f"{name}_weight_scale_2", param)
        return w13, w2, w13_scale, w2_scale, w13_bias, w2_bias
    if mxfp4_backend == Mxfp4MoeBackend.CPU:
        # Read as stored.
        return (
            w13_weight,
            w2_weight,
            w13_weight_scale,
            w2_weight_scale,
            w13_bias,
            w2_bias,
        )


# fork: edit 9f18ed0bdf84
def make_mxfp4_moe_quant_config(
    mxfp4_backend: Mxfp4MoeBackend,
    w1_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    layer: RoutedExperts | None,
) -> FusedMoEQuantConfig | None:
    # fork: at start
    if mxfp4_backend == Mxfp4MoeBackend.SITU_SM90:
        assert layer is not None
        return nvfp4_w4a16_moe_quant_config(
            g1_alphas=layer.w13_weight_scale_2,
            g2_alphas=layer.w2_weight_scale_2,
            w1_scale=w1_scale,
            w2_scale=w2_scale,
        )
