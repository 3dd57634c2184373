# SPDX-License-Identifier: Apache-2.0
"""MoE experts for CPU in plain torch, one GEMM pair per expert that has tokens.

The vectorised CPU kernels know neither SiTU nor NVFP4. Here an expert's weights
are asked for only when some token routes to it, so a subclass can keep them
packed and dequantise on the fly.
"""

from abc import abstractmethod
from collections.abc import Iterator

import torch
import torch.nn.functional as F

import vllm.model_executor.layers.fused_moe.modular_kernel as mk
from vllm.model_executor.layers.fused_moe.activation import MoEActivation
from vllm.model_executor.layers.fused_moe.config import (
    FusedMoEConfig,
    FusedMoEParallelConfig,
)
from vllm.model_executor.layers.fused_moe.situ import situ_and_mul
from vllm.model_executor.layers.fused_moe.topk_weight_and_reduce import (
    TopKWeightAndReduceNoOP,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import QuantKey
from vllm.platforms import current_platform

__all__ = ["CPUTorchExperts", "CPUTorchUnquantizedExperts", "tokens_by_expert"]


def tokens_by_expert(
    topk_ids: torch.Tensor, expert_map: torch.Tensor | None
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Group routed (token, slot) pairs by local expert.

    Args:
        topk_ids: integer ``[tokens, topk]``, global expert ids; -1 means no expert.
        expert_map: integer ``[global experts]`` giving the local index or -1, or
            None when all experts are local.

    Yields:
        ``(local expert, token indices [n], slot indices [n])`` in rising order of
        expert, for experts with n > 0 tokens only.
    """
    ids = topk_ids.flatten().long()
    if expert_map is not None:
        # A padding id of -1 must stay -1 and not wrap around to the last expert.
        ids = torch.where(ids < 0, ids, expert_map.long()[ids.clamp(min=0)])
    order = torch.argsort(ids, stable=True)
    experts, counts = torch.unique_consecutive(ids[order], return_counts=True)
    topk = topk_ids.shape[1]
    for expert, pairs in zip(experts.tolist(), order.split(counts.tolist())):
        if expert >= 0:
            yield expert, pairs // topk, pairs % topk


class CPUTorchExperts(mk.FusedMoEExpertsModular):
    """Base of the plain-torch experts: routing, GEMMs, activation, reduction.

    GEMMs run in the activation dtype, the activation function and the weighted
    sum over experts in float32.
    """

    # For packed weights: the format, and how many columns share a scale.
    weight_format, block = "", 1

    @abstractmethod
    def expert_w13(
        self, w1: torch.Tensor, expert: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the ``[gate; up]`` weight ``[2 * width, hidden]`` of one expert."""

    @abstractmethod
    def expert_w2(
        self, w2: torch.Tensor, expert: int, dtype: torch.dtype
    ) -> torch.Tensor:
        """Return the down weight ``[hidden, width]`` of one expert."""

    def gemm_input(self, x: torch.Tensor, gscale: torch.Tensor | None) -> torch.Tensor:
        """Hook for emulated activation quantisation; identity here."""
        return x

    def gate(self, gate_up: torch.Tensor, activation: MoEActivation) -> torch.Tensor:
        """Apply the gated activation to ``[n, 2 * width]``, in float32."""
        if activation == MoEActivation.SITU:
            config = self.activation_config
            assert config.activation_situ_beta is not None
            return situ_and_mul(
                gate_up,
                config.activation_situ_beta,
                config.activation_situ_linear_beta,
            )
        gate, up = gate_up.float().chunk(2, dim=-1)
        return F.silu(gate) * up

    @property
    def expects_unquantized_inputs(self) -> bool:
        return True

    @staticmethod
    def activation_format() -> mk.FusedMoEActivationFormat:
        return mk.FusedMoEActivationFormat.Standard

    @staticmethod
    def is_supported_config(
        cls: type[mk.FusedMoEExperts],
        moe_config: FusedMoEConfig,
        weight_key: QuantKey | None,
        activation_key: QuantKey | None,
        activation_format: mk.FusedMoEActivationFormat,
    ) -> tuple[bool, str | None]:
        assert issubclass(cls, CPUTorchExperts)
        width = moe_config.intermediate_size_per_partition
        if width % cls.block:
            return False, (
                f"a rank's expert width {width} (of {moe_config.intermediate_size} at "
                f"tp_size {moe_config.tp_size}) is no multiple of the "
                f"{cls.weight_format} block {cls.block}; use a smaller "
                "tensor-parallel size or expert parallelism"
            )
        if moe_config.has_bias:
            return False, "kernel does not support bias"
        if moe_config.swiglu_limit is not None:
            return False, "kernel does not support the SwiGLU clamp"
        return mk.FusedMoEExperts.is_supported_config(
            cls, moe_config, weight_key, activation_key, activation_format
        )

    @staticmethod
    def _supports_current_device() -> bool:
        return current_platform.is_cpu()

    @staticmethod
    def _supports_no_act_and_mul() -> bool:
        return False

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        return activation in (MoEActivation.SITU, MoEActivation.SILU)

    @staticmethod
    def _supports_parallel_config(moe_parallel_config: FusedMoEParallelConfig) -> bool:
        return True

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
        return (0,), (0,), (M, K)

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
        """Write the weighted sum over each token's local experts into ``output``.

        With ``apply_router_weight_on_input`` the caller has multiplied the input
        by the router weight already, and the sum is left unweighted.
        """
        x = self.gemm_input(hidden_states, self.a1_gscale)
        total = torch.zeros(output.shape, dtype=torch.float32, device=output.device)
        for expert, tokens, slots in tokens_by_expert(topk_ids, expert_map):
            gate_up = F.linear(x[tokens], self.expert_w13(w1, expert, x.dtype))
            hidden = self.gate(gate_up, activation).to(x.dtype)
            hidden = self.gemm_input(hidden, self.a2_gscale)
            down = F.linear(hidden, self.expert_w2(w2, expert, x.dtype)).float()
            if not apply_router_weight_on_input:
                down *= topk_weights[tokens, slots].float().unsqueeze(-1)
            total.index_add_(0, tokens, down)
        output.copy_(total)


class CPUTorchUnquantizedExperts(CPUTorchExperts):
    """Unquantised experts (float32, bfloat16, float16), for SiTU on CPU."""

    @staticmethod
    def _supports_activation(activation: MoEActivation) -> bool:
        # Everything else has a vectorised kernel.
        return activation == MoEActivation.SITU

    @staticmethod
    def _supports_quant_scheme(
        weight_key: QuantKey | None, activation_key: QuantKey | None
    ) -> bool:
        return weight_key is None and activation_key is None

    def expert_w13(
        self, w1: torch.Tensor, expert: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return w1[expert]

    def expert_w2(
        self, w2: torch.Tensor, expert: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return w2[expert]
