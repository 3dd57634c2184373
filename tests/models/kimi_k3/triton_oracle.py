# SPDX-License-Identifier: Apache-2.0
"""Compare the reference with the real K3 Triton kernels, run by Triton's interpreter.

Run as a program in a fresh process, since the interpreter is chosen when triton is
first imported:

    TRITON_INTERPRET=1 python triton_oracle.py    # JSON: case -> max |difference|

The kernel files are loaded by path, with stand-ins for the few vLLM modules they
import. Importing them the usual way would put vLLM's placeholder in triton's place
wherever no GPU driver is active.
"""

import importlib.util
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import reference
import torch
import triton
import triton.language as tl

KERNELS = "models/kimi_k3/amd/ops"
LOWER_BOUND = -5.0


# The interpreter swaps the members of `tl` while a kernel runs, so a kernel file that
# binds tl.exp at import needs a function that looks it up late.
@triton.jit
def _exp(x):
    return tl.exp(x)


@triton.jit
def _log(x):
    return tl.log(x)


def _load_kernels(file: str) -> ModuleType:
    """Execute one kernel file of the installed vLLM against the stand-ins."""
    stand_ins = {
        "vllm.triton_utils": {"triton": triton, "tl": tl},
        "vllm.third_party.flash_linear_attention.ops.op": {"exp": _exp, "log": _log},
        "vllm.utils.math_utils": {
            "cdiv": triton.cdiv,
            "next_power_of_2": triton.next_power_of_2,
        },
        "vllm.platforms": {
            "current_platform": SimpleNamespace(is_cpu=lambda: False, is_arch_support_pdl=lambda: False)
        },
        "vllm.v1.attention.backends.utils": {"NULL_BLOCK_ID": 0, "PAD_SLOT_ID": -1},
        "vllm.models.kimi_k3.cpu.attn_res": {"attn_res": None},
    }
    for name, members in stand_ins.items():
        module = ModuleType(name)
        module.__dict__.update(members)
        sys.modules[name] = module
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("vllm is not importable; its kernel files are needed")
    path = Path(package.submodule_search_locations[0]) / file
    spec = importlib.util.spec_from_file_location(path.stem + "_kernels", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _kda_inputs(tokens: int, heads: int, dim: int, seed: int) -> dict[str, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=gen)

    return {
        "q": normal(tokens, heads, dim),
        "k": normal(tokens, heads, dim),
        "v": normal(tokens, heads, dim),
        "raw_g": normal(tokens, heads, dim),
        "raw_beta": normal(tokens, heads),
        "A_log": normal(heads) * 0.5,
        "dt_bias": normal(heads * dim) - 1,
        "state": normal(heads, dim, dim) * 0.3,
    }


def _reference_kda(x: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    a = x["raw_g"] + x["dt_bias"].view(x["raw_g"].shape[1:])
    log_decay = LOWER_BOUND * torch.sigmoid(x["A_log"][:, None].exp() * a)
    return reference.kda_recurrence(x["q"], x["k"], x["v"], log_decay, x["raw_beta"].sigmoid(), x["state"])


def recurrent(kernels: ModuleType) -> float:
    """Two sequences of three tokens, each from its own initial state.

    The kernel writes the state after token i to the i-th slot of its sequence and
    starts from the slot that ``num_accepted_tokens`` names.
    """
    tokens, heads, dim = 3, 2, 32
    runs = [_kda_inputs(tokens, heads, dim, seed) for seed in (1, 2)]
    shared = {key: runs[0][key] for key in ("A_log", "dt_bias")}
    runs = [{**run, **shared} for run in runs]
    slots = torch.arange(1, 1 + len(runs) * tokens, dtype=torch.int32)
    slots = slots.view(len(runs), tokens)
    state = torch.full((1 + slots.numel(), heads, dim, dim), float("nan"))
    for run, row in zip(runs, slots, strict=True):
        state[row[0]] = run["state"]
    packed = {key: torch.cat([run[key] for run in runs])[None] for key in ("q", "k", "v", "raw_g", "raw_beta")}
    out, state = kernels.fused_recurrent_kda(
        **packed,
        **shared,
        lower_bound=LOWER_BOUND,
        initial_state=state,
        cu_seqlens=torch.tensor([0, tokens, 2 * tokens], dtype=torch.int32),
        ssm_state_indices=slots,
        num_accepted_tokens=torch.ones(len(runs), dtype=torch.int32),
    )
    worst = 0.0
    for index, run in enumerate(runs):
        want, want_state = _reference_kda(run)
        got = out[0, index * tokens : (index + 1) * tokens]
        worst = max(
            worst,
            (got - want).abs().max().item(),
            (state[slots[index, -1]] - want_state).abs().max().item(),
        )
    return worst


def packed_decode(kernels: ModuleType) -> float:
    """One token for each of two requests, from packed q, k, v."""
    heads, dim = 2, 64
    runs = [_kda_inputs(1, heads, dim, seed) for seed in (3, 4)]
    shared = {key: runs[0][key] for key in ("A_log", "dt_bias")}
    runs = [{**run, **shared} for run in runs]
    state = torch.stack([torch.zeros_like(runs[0]["state"])] + [r["state"] for r in runs])
    mixed = torch.cat([torch.cat([r[p].flatten(1) for p in "qkv"], 1) for r in runs])
    out, state = kernels.fused_recurrent_kda_packed_decode(
        mixed_qkv=mixed,
        raw_g=torch.cat([run["raw_g"] for run in runs])[None],
        raw_beta=torch.cat([run["raw_beta"] for run in runs])[None],
        **shared,
        lower_bound=LOWER_BOUND,
        initial_state=state,
        state_indices=torch.tensor([1, 2], dtype=torch.int32),
    )
    worst = 0.0
    for index, run in enumerate(runs):
        want, want_state = _reference_kda(run)
        worst = max(
            worst,
            (out[0, index] - want[0]).abs().max().item(),
            (state[index + 1] - want_state).abs().max().item(),
        )
    return worst


def short_conv(kernels: ModuleType) -> float:
    """Six tokens of two requests, one decode step after the other."""
    requests, tokens, channels, taps = 2, 6, 24, 4
    gen = torch.Generator().manual_seed(6)
    x = torch.randn(requests, tokens, channels, generator=gen)
    weight = torch.randn(channels, 1, taps, generator=gen)
    state = torch.zeros(1 + requests, channels, taps - 1)
    slots = torch.tensor([2, 1], dtype=torch.int32)
    steps = [
        kernels.causal_conv1d_update(
            x[:, t].clone(),
            state,
            weight[:, 0].contiguous(),
            activation="silu",
            conv_state_indices=slots,
        )
        for t in range(tokens)
    ]
    want = torch.stack([reference.short_conv(run, weight) for run in x])
    return (torch.stack(steps, 1) - want).abs().max().item()


def attention_residual(kernels: ModuleType) -> float:
    """Mixes over 0, 1 and 5 blocks, with and without a delta; the output is normed.

    The kernel is launched here, since its wrapper sends CPU tensors elsewhere.
    """
    tokens, hidden, eps = 3, 96, 1e-5
    gen = torch.Generator().manual_seed(5)
    worst = 0.0
    for blocks in (0, 1, 5):
        for with_delta in (False, True):
            prefix, delta = (torch.randn(tokens, hidden, generator=gen) for _ in "pd")
            bank = torch.randn(tokens, max(blocks, 1), hidden, generator=gen)
            norm, proj, out_norm = (torch.randn(hidden, generator=gen) for _ in "npo")
            summed = prefix + delta if with_delta else prefix
            want = reference.attn_res([*bank[:, :blocks].unbind(1), summed], norm, proj, eps)
            want = reference.rms_norm(want, out_norm, eps)
            got = torch.full_like(prefix, float("nan"))
            kernels._attn_res_kernel[(tokens,)](
                prefix.clone(),
                delta if with_delta else None,
                bank,
                norm,
                proj,
                out_norm,
                got,
                stride_prefix_m=hidden,
                stride_delta_m=hidden,
                stride_block_m=bank.stride(0),
                stride_block_r=bank.stride(1),
                stride_output_m=hidden,
                num_blocks=blocks,
                hidden_size=hidden,
                block_write_idx=-1,
                eps=eps,
                output_norm_eps=eps,
                HAS_DELTA=with_delta,
                WRITE_BLOCK=False,
                APPLY_OUTPUT_NORM=True,
                BLOCK_L=4 if blocks > 1 else 1,
                BLOCK_D=triton.next_power_of_2(hidden),
            )
            worst = max(worst, (got - want).abs().max().item())
    return worst


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("set TRITON_INTERPRET=1: the kernels run on CPU tensors.")
    torch.manual_seed(0)
    kda = _load_kernels(f"{KERNELS}/third_party/kda/fused_recurrent.py")
    conv = _load_kernels("model_executor/layers/mamba/ops/causal_conv1d.py")
    residual = _load_kernels(f"{KERNELS}/attn_res.py")
    results = {
        "kda recurrent": recurrent(kda),
        "kda packed decode": packed_decode(kda),
        "short conv": short_conv(conv),
        "attn_res": attention_residual(residual),
    }
    print(json.dumps(results))


if __name__ == "__main__":
    main()
