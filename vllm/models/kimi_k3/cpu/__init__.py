# SPDX-License-Identifier: Apache-2.0
"""Kimi K3 on the CPU platform, for development, CI and checkpoint proofs.

The module graph is the ROCm twin's (``..amd``), which is plain PyTorch around
replaceable kernels; this package holds the kernels that GPUs take from Triton
or CUDA: Kimi Delta Attention (``kda``) and attention residuals (``attn_res``).
"""

from typing import Any

from vllm.platforms import current_platform


def use_portable_classes(namespace: dict[str, Any]) -> bool:
    """Point the registry's names at classes that run on the CPU platform."""
    if not current_platform.is_cpu():
        return False
    from vllm.models.kimi_k3.amd.model import KimiK3ForConditionalGeneration
    from vllm.models.kimi_k3.cpu.linear import KimiLinearForCausalLM

    namespace["KimiK3ForConditionalGeneration"] = KimiK3ForConditionalGeneration
    namespace["KimiLinearForCausalLM"] = KimiLinearForCausalLM
    return True
