# SPDX-License-Identifier: Apache-2.0
"""Kimi K3 on the CPU platform, for development, CI and checkpoint proofs.

The module graph is the ROCm twin's (``..amd``), which is plain PyTorch around
replaceable kernels; this package holds the kernels that GPUs take from Triton
or CUDA: Kimi Delta Attention (``kda``) and attention residuals (``attn_res``).
"""
