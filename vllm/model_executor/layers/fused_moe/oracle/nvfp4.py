# SPDX-License-Identifier: Apache-2.0

import torch

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.distributed import get_ep_group
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEQuantConfig,
    nvfp4_w4a16_moe_quant_config,
)
from vllm.model_executor.layers.fused_moe.experts.nvfp4_situ_sm90 import (
    NvFp4SituSm90Experts,
    pack_nvfp4_situ_sm90,
)
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import RoutedExperts
from vllm.model_executor.layers.fused_moe.situ import check_situ_config
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey
from vllm.platforms import current_platform


# fork: extend
class NvFp4MoeBackend:
    CPU = "CPU"
    SITU_SM90 = "SITU_SM90"


def scales_gate_and_up_apart(backend: NvFp4MoeBackend) -> bool:
    """Whether the experts of ``backend`` take a tensor scale each for gate and up."""
    own = (NvFp4MoeBackend.CPU, NvFp4MoeBackend.SITU_SM90)
    return backend in own or current_platform.is_cpu()


# fork: edit 290fcf356c3b
def backend_to_kernel_cls(
    backend: NvFp4MoeBackend,
) -> list[type[mk.FusedMoEExperts]]:
    # fork: at start
    if backend == NvFp4MoeBackend.SITU_SM90:
        return [NvFp4SituSm90Experts]
    if backend == NvFp4MoeBackend.CPU or current_platform.is_cpu():
        from vllm.model_executor.layers.fused_moe.experts.cpu_nvfp4_moe import (
            CPUNvFp4EmulationExperts,
            CPUNvFp4Experts,
        )

        if backend == NvFp4MoeBackend.CPU:
            return [CPUNvFp4Experts]
        if backend == NvFp4MoeBackend.EMULATION:
            return [CPUNvFp4EmulationExperts]


# fork: edit 845009cdccc4
def map_nvfp4_backend(mapping) -> NvFp4MoeBackend:
    # fork: after mapping
    mapping["situ_sm90"] = NvFp4MoeBackend.SITU_SM90


# fork: edit 4f3ba287a4cb
def select_nvfp4_moe_backend(
    config: FusedMoEConfig,
    weight_key: QuantKey | None,
    activation_key: QuantKey | None,
    activation_format: mk.FusedMoEActivationFormat,
    AVAILABLE_BACKENDS: list[NvFp4MoeBackend],
    _return_or_raise,
) -> tuple[NvFp4MoeBackend, type[mk.FusedMoEExperts]]:
    # fork: at start
    check_situ_config(config, "NVFP4")
    # fork: after AVAILABLE_BACKENDS[0]
    # Marlin, the other choice there, was slower at every size measured, and takes
    # one tensor scale for gate and up.
    marlin = AVAILABLE_BACKENDS.index(NvFp4MoeBackend.MARLIN)
    AVAILABLE_BACKENDS.insert(marlin, NvFp4MoeBackend.SITU_SM90)
    # fork: before for[0]
    if current_platform.is_cpu():
        return _return_or_raise(
            NvFp4MoeBackend.CPU, config, weight_key, activation_key, activation_format
        )


# fork: edit ff1e5a8f0400
def convert_to_nvfp4_moe_kernel_format(
    nvfp4_backend: NvFp4MoeBackend,
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_scale_2: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_scale_2: torch.Tensor,
    layer: RoutedExperts,
    a13_scale: torch.Tensor,
    a2_scale: torch.Tensor,
):
    # fork: at start
    if nvfp4_backend == NvFp4MoeBackend.CPU:
        # Read as stored, weight-only: input scales have no use.
        return w13, w13_scale, w13_scale_2, None, w2, w2_scale, w2_scale_2, None
    if nvfp4_backend == NvFp4MoeBackend.SITU_SM90:
        w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2 = pack_nvfp4_situ_sm90(
            w13, w13_scale, w13_scale_2, w2, w2_scale, w2_scale_2
        )
        return w13, w13_scale, w13_scale_2, None, w2, w2_scale, w2_scale_2, None
    # One scale for the experts of all ranks, as a single rank has for all of them.
    # fork: instead-of a13_scale[-1]
    a13_scale = 1.0 / _largest_on_expert_ranks(layer, a13_scale)  # noqa: F841
    # fork: instead-of a2_scale[-1]
    a2_scale = 1.0 / _largest_on_expert_ranks(layer, a2_scale)  # noqa: F841


def _largest_on_expert_ranks(
    layer: RoutedExperts, scale: torch.Tensor
) -> torch.Tensor:
    """Return the largest value of a tensor over all expert-parallel ranks."""
    largest = scale.max().to(torch.float32)
    if layer.moe_config.moe_parallel_config.ep_size > 1:
        group = get_ep_group().device_group
        torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX, group)
    return largest


# fork: edit a18573c91ec4
def make_nvfp4_moe_quant_config(
    backend: NvFp4MoeBackend,
    w13_scale: torch.Tensor,
    w2_scale: torch.Tensor,
    w13_scale_2: torch.Tensor,
    w2_scale_2: torch.Tensor,
) -> FusedMoEQuantConfig:
    # fork: at start
    if backend in (NvFp4MoeBackend.CPU, NvFp4MoeBackend.SITU_SM90):
        return nvfp4_w4a16_moe_quant_config(
            g1_alphas=w13_scale_2,
            g2_alphas=w2_scale_2,
            w1_scale=w13_scale,
            w2_scale=w2_scale,
        )
