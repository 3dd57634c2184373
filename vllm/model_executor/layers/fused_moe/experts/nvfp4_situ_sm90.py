# SPDX-License-Identifier: Apache-2.0
"""NVFP4 and MXFP4 experts with SiTU for Hopper (W4A16, BF16 tensor cores).

Hopper has no FP4 arithmetic. Released vLLM serves NVFP4 experts there by Marlin, and
that with one tensor scale for gate and up together. This class keeps the scales apart
and reads the packed weights in a layout made for the tensor cores' register operand;
``docs/hopper-notes.md`` holds the measurements behind it.
"""

import torch

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.logger import init_logger
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
)
from vllm.model_executor.layers.fused_moe.experts.nvfp4_situ_sm90_layout import (
    COLUMNS,
    pack_experts,
)
from vllm.model_executor.layers.fused_moe.experts.nvfp4_situ_sm90_ops import (
    nvfp4_situ_moe,
    prepare_kernels,
    workspace_sizes,
)
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    QuantKey,
    kMxfp4Static,
    kNvfp4Dynamic,
    kNvfp4Static,
)
from vllm.platforms import current_platform

logger = init_logger(__name__)

__all__ = ["Mxfp4SituSm90Experts", "NvFp4SituSm90Experts", "pack_nvfp4_situ_sm90"]


def pack_nvfp4_situ_sm90(
    w13: torch.Tensor,
    w13_scale: torch.Tensor,
    w13_scale_2: torch.Tensor,
    w2: torch.Tensor,
    w2_scale: torch.Tensor,
    w2_scale_2: torch.Tensor,
) -> tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]:
    """Bring loaded NVFP4 experts into the kernel's layout, in place where sizes allow.

    Args:
        w13: Codes of ``[gate | up]``, uint8 ``[experts, 2 * width, hidden / 2]``.
        w13_scale: e4m3 ``[experts, 2 * width, hidden / 16]``.
        w13_scale_2: Tensor scales, float32 ``[experts, 2]`` or ``[experts]``.
        w2: Codes, uint8 ``[experts, hidden, width / 2]``.
        w2_scale: e4m3 ``[experts, hidden, width / 16]``.
        w2_scale_2: Tensor scales, float32 ``[experts]``.

    Returns:
        The same six, packed; each keeps experts as its first dimension.
    """
    experts = w13.shape[0]
    w13, w13_scale = pack_experts(w13, w13_scale, gated=True, in_place=True)
    w2, w2_scale = pack_experts(w2, w2_scale, gated=False, in_place=True)
    gate_up = w13_scale_2.float().view(experts, -1).expand(experts, 2).contiguous()
    down = w2_scale_2.float().view(experts).contiguous()
    return w13, w13_scale, gate_up, w2, w2_scale, down


class NvFp4SituSm90Experts(mk.FusedMoEExpertsModular):
    """NVFP4 weights, BF16 activations, SiTU within the first GEMM.

    ``quant_config.g1_alphas`` holds the tensor scales of gate and up, float32
    ``[experts, 2]``, ``g2_alphas`` those of down, ``[experts]``; weights and block
    scales are packed by :func:`pack_nvfp4_situ_sm90`.
    """

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def _supports_current_device() -> bool:
        # sm_90a code runs on compute capability 9.0 and nothing else.
        return current_platform.is_cuda() and current_platform.is_device_capability(90)

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_quant_scheme(
        weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        return weight_key == kNvfp4Static and activation_key in (None, kNvfp4Dynamic)

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation == MoEActivation.SITU

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return not moe_parallel_config.use_fi_nvl_two_sided_kernels

    @staticmethod
    def _supports_shape(hidden_dim: int) -> bool:
        return hidden_dim % COLUMNS == 0

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts],
        moe_config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        supported, reason = mk.FusedMoEExpertsModular.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )
        width = moe_config.intermediate_size_per_partition
        if supported and moe_config.in_dtype != torch.bfloat16:
            supported = False
            reason = f"kernel takes bfloat16 activations, not {moe_config.in_dtype}"
        elif supported and width % 16:
            supported, reason = False, f"expert width {width} is no multiple of 16"
        hopper = NvFp4SituSm90Experts._supports_current_device()
        if hopper and moe_config.activation == MoEActivation.SITU:
            if supported:
                reason = "Hopper has no FP4 arithmetic: BF16 products, faster than Marlin"
            verb = "taken" if supported else "not taken"
            logger.info_once("SITU_SM90 experts %s: %s.", verb, reason)
        return supported, None if supported else reason

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Compile and load the kernels; the weights are packed by then."""
        assert self.g1_alphas is not None
        prepare_kernels(
            self.g1_alphas.device.index,
            layer.w2_weight.shape[1] * 16,
            layer.w13_weight.shape[1] * 8,
        )

    def moe_problem_size(
        self,
        a1: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_ids: torch.Tensor,
    ) -> tuple[int, int, int, int, int]:
        """Read sizes off the packed weights; N counts gate and up rows."""
        tokens, hidden = a1.shape
        return w1.shape[0], tokens, w1.shape[1] * 16, hidden, topk_ids.shape[1]

    def finalize_weight_and_reduce_impl(self) -> mk.TopKWeightAndReduce:
        return TopKWeightAndReduceNoOP()

    def workspace_shapes(
        self,
        M: int,
        N: int,
        K: int,
        topk: int,
        global_num_experts: int,
        local_num_experts: int,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        activation: MoEActivation,
    ) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        # The output shares memory with the first workspace, which holds the
        # activations: they are dead when the reduction writes the output.
        first, second = workspace_sizes(M * topk, N // 2, K)
        return (max(first, M * K),), (second,), (M, K)

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        a1q_scale: torch.Tensor | None,
        a2_scale: torch.Tensor | None,
        workspace13: torch.Tensor,
        workspace2: torch.Tensor,
        expert_tokens_meta: mk.ExpertTokensMetadata | None,
        apply_router_weight_on_input: bool,
    ) -> None:
        assert self.w1_scale is not None and self.w2_scale is not None
        assert self.g1_alphas is not None and self.g2_alphas is not None
        beta = self.activation_config.activation_situ_beta
        assert activation == MoEActivation.SITU and beta is not None
        if apply_router_weight_on_input:
            hidden_states = hidden_states * topk_weights.to(hidden_states.dtype)
            topk_weights = torch.ones_like(topk_weights)
        nvfp4_situ_moe(
            output,
            hidden_states,
            w1,
            self.w1_scale,
            self.g1_alphas,
            w2,
            self.w2_scale,
            self.g2_alphas,
            topk_weights,
            topk_ids,
            expert_map,
            global_num_experts,
            beta,
            self.activation_config.activation_situ_linear_beta,
            activation=workspace13,
            rows=workspace2,
        )


class Mxfp4SituSm90Experts(NvFp4SituSm90Experts):
    """The same kernel on MXFP4, its scales said in NVFP4's (``mxfp4_as_nvfp4``)."""

    @staticmethod
    def _supports_quant_scheme(
        weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        return weight_key == kMxfp4Static and activation_key is None
