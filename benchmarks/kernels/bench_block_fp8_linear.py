# SPDX-License-Identifier: Apache-2.0
"""Block-FP8 linears of Kimi K3 on Hopper: this fork's kernel, its peers and the floor.

Method: K3's attention linears as one of eight tensor-parallel ranks holds them, seeded
random codes, scales and inputs. A CUDA graph holds one call for each of several copies
of the weight, together at least 256 MB (at most 64 copies), so that no call finds its
weight in L2; the time is the graph's over the calls, median over replays. Peers in the
same process on the same values: CUTLASS as released vLLM 0.28 runs it (activations
quantised by 1x128 groups, then the product), the same with the padded columns copied
away, Triton with its default configuration, and BF16 (`torch.nn.functional.linear` on
the dequantised weight, logical size). The floor is the larger of bytes over copy
bandwidth (4.27 TB/s) and arithmetic over twice the measured BF16 matrix rate (1580
TFLOP/s). Errors are ‖out − ref‖/‖ref‖ against float64.

    python benchmarks/kernels/bench_block_fp8_linear.py --json results.json
"""

import argparse
import json
from dataclasses import asdict, replace
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from measure import BANDWIDTH, FP8_RATE, error, graph_time, versions

from vllm import _custom_ops as ops
from vllm.model_executor.kernels.linear.scaled_mm.block_fp8_few_tokens import (
    MAX_TOKENS,
    block_fp8_few_tokens,
    clusters_at_once,
    few_tokens_plan,
)
from vllm.model_executor.kernels.linear.scaled_mm.hopper_block_fp8 import (
    HopperFp8BlockScaledMMKernel,  # registers the operator
)
from vllm.model_executor.layers.quantization.utils.fp8_utils import (
    per_token_group_quant_fp8,
    w8a8_triton_block_scaled_mm,
)
from vllm.utils.nvrtc import SHARED_LIMIT

SHAPES = {  # logical rows, columns; a rank of TP8
    "kda_in_proj": (6288, 7168),
    "mla_qkv_a": (2112, 7168),
    "mla_q_b": (2304, 1536),
    "o_proj": (7168, 1536),
    "mla_g": (1536, 7168),
    "kda_f_b": (1536, 128),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


class Linear:
    """One weight as each kernel takes it, in enough copies to miss L2."""

    def __init__(self, rows: int, columns: int, seed: int = 1) -> None:
        gen = torch.Generator("cuda").manual_seed(seed)
        self.rows, self.columns, self.padded = rows, columns, rows + -rows % 128
        shape = self.padded, columns
        codes = torch.empty(shape, dtype=torch.uint8, device="cuda").random_(0, 127, generator=gen)
        codes += 128 * torch.empty_like(codes).random_(0, 2, generator=gen)
        codes[rows:] = 0
        blocks = self.padded // 128, columns // 128
        self.scale = torch.rand(blocks, generator=gen, device="cuda") * 1e-3 + 1e-4
        self.weight = codes.view(torch.float8_e4m3fn)
        copies = max(2, min(64, -(-(256 << 20) // codes.numel())))
        self.fp8 = [self.weight.clone() for _ in range(copies)]
        dense = self.dense(torch.float32)[:rows].bfloat16()
        self.bf16 = [dense.clone() for _ in range(max(2, copies // 2))]
        self.gen = gen

    def dense(self, dtype: torch.dtype) -> torch.Tensor:
        return self.weight.to(dtype) * self.scale.to(dtype).repeat_interleave(128, 0).repeat_interleave(128, 1)

    def cases(self, tokens: int) -> list[SimpleNamespace]:
        x = torch.randn(tokens, self.columns, generator=self.gen, device="cuda").bfloat16()
        return [SimpleNamespace(x=x, fp8=w, bf16=self.bf16[i % len(self.bf16)]) for i, w in enumerate(self.fp8)]

    def ours(self, case) -> torch.Tensor:
        y = torch.ops.vllm.block_fp8_linear_sm90(case.x, case.fp8, self.scale)
        return y[:, : self.rows]

    def cutlass(self, case) -> torch.Tensor:
        codes, factors = per_token_group_quant_fp8(case.x, 128, column_major_scales=True, use_ue8m0=False)
        return ops.cutlass_scaled_mm(
            codes, case.fp8.T, scale_a=factors, scale_b=self.scale.T, out_dtype=torch.bfloat16
        )

    def cutlass_copied(self, case) -> torch.Tensor:
        return self.cutlass(case)[:, : self.rows].contiguous()

    def triton(self, case) -> torch.Tensor:
        codes, factors = per_token_group_quant_fp8(case.x, 128, use_ue8m0=False)
        return w8a8_triton_block_scaled_mm(codes, case.fp8, factors, self.scale, [128, 128], torch.bfloat16)

    def matmul(self, case) -> torch.Tensor:
        return F.linear(case.x, case.bf16)

    def floor_us(self, tokens: int) -> float:
        moved = self.rows * self.columns + 2 * tokens * (self.rows + self.columns)
        return 1e6 * max(moved / BANDWIDTH, 2 * tokens * self.rows * self.columns / FP8_RATE)


PEERS = {
    "ours": Linear.ours,
    "cutlass": Linear.cutlass,
    "cutlass+copy": Linear.cutlass_copied,
    "triton": Linear.triton,
    "bf16": Linear.matmul,
}


def measure(name: str, tokens: list[int]) -> list[dict]:
    linear, rows = Linear(*SHAPES[name]), []
    dense = linear.dense(torch.float64)[: linear.rows]
    for count in tokens:
        cases = linear.cases(count)
        want = cases[0].x.double() @ dense.T
        row = {"shape": name, "rows": linear.rows, "columns": linear.columns, "tokens": count}
        row["floor_us"] = linear.floor_us(count)
        for peer, run in PEERS.items():
            out = run(linear, cases[0])[:, : linear.rows]
            row[peer] = {
                "us": graph_time(lambda c, run=run: run(linear, c), cases),
                "error": error(out, want),
            }
        rows.append(row)
        times = "  ".join(f"{peer} {row[peer]['us']:7.1f} {row[peer]['error']:.1e}" for peer in PEERS)
        best = row["ours"]["us"]
        print(f"{name:12} {count:5}  floor {row['floor_us']:6.1f} ({row['floor_us'] / best:.2f})  {times}", flush=True)
    return rows


def tune(name: str) -> list[dict]:
    """Time every plan for few tokens; the best, beside the default."""
    linear, found = Linear(*SHAPES[name]), []
    blocks = linear.columns // 128
    for tokens in (1, 8, 16, 32, MAX_TOKENS):
        cases = linear.cases(tokens)
        default = few_tokens_plan(tokens, linear.padded, linear.columns, clusters_at_once())
        plans = {replace(default, split=n, share=-(-blocks // n)) for n in range(1, min(8, blocks) + 1)}
        times = {}
        for plan in plans:
            if (plan.split - 1) * plan.share < blocks and plan.shared <= SHARED_LIMIT:
                times[plan] = graph_time(
                    lambda c, p=plan: block_fp8_few_tokens(c.x, c.fp8, linear.scale, p), cases, 5
                )
        best = min(times, key=times.__getitem__)
        found.append({"shape": name, "tokens": tokens, "default_us": times[default], "best_us": times[best]})
        found[-1] |= {"default": asdict(default), "best": asdict(best)}
        found[-1]["all"] = [{**asdict(plan), "us": us} for plan, us in sorted(times.items(), key=lambda x: x[1])]
        print(f"{name:12} {tokens:3}  default {times[default]:6.1f}  best {times[best]:6.1f} {best}", flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--tune", action="store_true", help="time the plans for few tokens instead")
    parser.add_argument("--commit", help="recorded; asked of git if left out")
    parser.add_argument("--json")
    args = parser.parse_args()
    supported, reason = HopperFp8BlockScaledMMKernel.is_supported()
    if not supported:
        parser.error(str(reason))
    result = {"method": __doc__, **versions(args.commit), "rows": []}
    for name in args.shapes:
        result["rows"] += tune(name) if args.tune else measure(name, args.tokens)
        if args.json:
            with open(args.json, "w") as file:
                json.dump(result, file, indent=1)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
