# SPDX-License-Identifier: Apache-2.0
"""Faults to plant in a CPU engine, to see whether the accuracy gate notices them.

`vllm serve --worker-extension-cls tests.accuracy.faults.Planted` imports this module in each worker before the model is
built; the environment variable ``PLANTED_FAULT`` names the fault. A fault of a GPU kernel is planted as the same
arithmetic in the CPU kernel. Only what the fault needs is replaced; nothing here runs in a healthy engine.
"""

import os
from collections.abc import Callable

import torch

__all__ = ["FAULTS", "Planted"]


def _experts(change_13=None, change_2=None) -> None:
    """Change an NVFP4 expert's dequantised banks: f(experts, expert, weight) -> weight."""
    from vllm.model_executor.layers.fused_moe.experts.cpu_nvfp4_moe import CPUNvFp4Experts as Experts

    for name, change in (("expert_w13", change_13), ("expert_w2", change_2)):
        if change is not None:
            right = getattr(Experts, name)
            setattr(Experts, name, _changed(right, change))


def _changed(right, change):
    def weight(self, packed, expert, dtype):
        return change(self, expert, right(self, packed, expert, torch.float32)).to(dtype)

    return weight


def _pair(experts, expert: int) -> torch.Tensor:
    """Tensor scales (gate, up) of an expert as multipliers, [2, 1, 1]."""
    return experts.g1_alphas[expert].float().expand(2).view(2, 1, 1)


def _halves(weight: torch.Tensor) -> torch.Tensor:
    return weight.unflatten(0, (2, -1))


def g1_scale_c_folded_twice() -> None:
    """The up half's tensor scale once more on what the expert returns, as 0.28.0's TRTLLM experts do."""
    _experts(change_2=lambda experts, expert, weight: weight * _pair(experts, expert)[1].squeeze())


def w1_w3_scales_swapped() -> None:
    _experts(lambda e, n, weight: (_halves(weight) * _pair(e, n).flip(0) / _pair(e, n)).flatten(0, 1))


def w3_scale_ignored() -> None:
    """Both halves with the tensor scale of w1."""
    _experts(lambda e, n, weight: (_halves(weight) * _pair(e, n)[:1] / _pair(e, n)).flatten(0, 1))


def divisor_as_multiplier() -> None:
    """compressed-tensors' global scale, a divisor, multiplied with."""
    _experts(
        lambda e, n, weight: (_halves(weight) / _pair(e, n).square()).flatten(0, 1),
        lambda e, n, weight: weight / e.g2_alphas[n].float() ** 2,
    )


def gate_up_swapped() -> None:
    _experts(lambda e, n, weight: _halves(weight).flip(0).flatten(0, 1))


def linear_beta_dropped() -> None:
    """Routed experts only; the shared ones and the dense layer keep theirs."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_torch_moe

    right = cpu_torch_moe.situ_and_mul
    cpu_torch_moe.situ_and_mul = lambda gate_up, beta, linear_beta: right(gate_up, beta, None)


def _block_fp8(rescale) -> None:
    """Give block-FP8 linears another scale per weight row and column block.

    `rescale(layer, scale)` gets the right scales, [rows, column blocks], and returns those to use, or None.
    """
    from vllm.model_executor.layers.quantization.block_fp8_linear import BLOCK, BlockFp8LinearMethod

    right = BlockFp8LinearMethod.process_weights_after_loading

    def process(self, layer) -> None:
        codes = layer.weight.data.clone().float()
        scale = getattr(layer, layer.block_fp8.scale_name).data[:, :-1].clone()
        right(self, layer)
        wrong = rescale(layer, scale)
        if wrong is not None:
            dense = codes * wrong.repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
            self.apply = lambda layer, x, bias=None: torch.nn.functional.linear(x, dense.to(x.dtype), bias)

    BlockFp8LinearMethod.process_weights_after_loading = process


def mla_gate_half_a_block_off() -> None:
    """The gate's scale rows behind the 4.5 blocks of kv_a, as releases from 0.29 on fuse them."""
    last = {}

    def rescale(layer, scale):
        module = layer.prefix.rpartition(".")[0]
        if layer.prefix.endswith(".fused_qkv_a_proj"):
            last[module] = scale[-1:]
        elif layer.prefix.endswith(".self_attn.g_proj"):
            return torch.cat((last[module].expand(64, -1), scale))[: len(scale)]

    _block_fp8(rescale)


def rank_0_scales_everywhere() -> None:
    def rescale(layer, scale):
        from vllm.distributed import get_tp_group

        return get_tp_group().broadcast(scale.contiguous(), src=0)

    _block_fp8(rescale)


def kv_b_absorbed_without_scales() -> None:
    """Codes taken for values where MLA absorbs kv_b."""
    from vllm.model_executor.layers.quantization.block_fp8_linear import BlockFp8LinearMethod

    right = BlockFp8LinearMethod.dequantized_weight

    def dequantized(self, layer, out_dtype):
        dense = right(self, layer, torch.float32)
        rows, columns = (n // 128 for n in dense.shape)
        blocks = layer.weight_scale.data[:rows, :columns]
        spread = blocks.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (dense / spread).to(out_dtype)

    BlockFp8LinearMethod.dequantized_weight = dequantized


def a_log_by_stored_length() -> None:
    """A rank's share of the stored values instead of the heads: zeros on the last ranks."""
    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as kda

    def loader(param, loaded):
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        share = loaded.flatten().chunk(get_tensor_model_parallel_world_size())[get_tensor_model_parallel_rank()]
        param.data.copy_(share[: param.numel()].view_as(param))

    kda.a_log_weight_loader = lambda shard_axis: loader


def stale_recurrent_state() -> None:
    """Requests start from what the last one left in their block."""
    from vllm.models.kimi_k3.cpu.kda_metadata import CPUKDAMetadataBuilder

    right = CPUKDAMetadataBuilder.build

    def build(self, *args, **kwargs):
        metadata = right(self, *args, **kwargs)
        metadata.has_initial_state = torch.ones_like(metadata.has_initial_state)
        return metadata

    CPUKDAMetadataBuilder.build = build


# Name -> what plants it, and the cell that shows it: format and parallelism.
FAULTS: dict[str, tuple[Callable[[], None], str, str]] = {
    plant.__name__: (plant, format, engine)
    for plant, format, engine in (
        (g1_scale_c_folded_twice, "nvfp4-modelopt", "tp1"),
        (mla_gate_half_a_block_off, "nvfp4-modelopt", "tp1"),
        (kv_b_absorbed_without_scales, "nvfp4-modelopt", "tp1"),
        (linear_beta_dropped, "nvfp4-modelopt", "tp1"),
        (stale_recurrent_state, "nvfp4-modelopt", "tp1"),
        (gate_up_swapped, "nvfp4-modelopt", "tp1"),
        (w1_w3_scales_swapped, "nvfp4-ct", "tp1"),
        (w3_scale_ignored, "nvfp4-ct", "tp1"),
        (divisor_as_multiplier, "nvfp4-ct", "tp1"),
        (rank_0_scales_everywhere, "fp8-block-ct", "tp2"),
        (a_log_by_stored_length, "nvfp4-modelopt", "tp2"),
    )
}


class Planted:
    """Nothing but a reason for workers to import this module."""


if planted := os.environ.get("PLANTED_FAULT"):
    FAULTS[planted][0]()
