# SPDX-License-Identifier: Apache-2.0

import torch

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.oracle.mxfp4 import (
    FusedMoEConfig,
    Mxfp4MoeBackend,
    _return_or_raise,
)
from vllm.model_executor.layers.fused_moe.situ import check_situ_config
from vllm.model_executor.layers.quantization.utils.quant_utils import kMxfp4Static
from vllm.platforms import current_platform


# fork: edit bc93995c68bc
def backend_to_kernel_cls(
    backend: Mxfp4MoeBackend,
    upstream,
) -> list[type[mk.FusedMoEExperts]]:
    # The AMX kernel knows neither SiTU nor float32.
    # fork: instead-of return[-2]
    from vllm.model_executor.layers.fused_moe.experts.cpu_mxfp4_moe import (
        CPUMxfp4Experts,
    )

    return [*upstream, CPUMxfp4Experts]


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
):
    # fork: at start
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
