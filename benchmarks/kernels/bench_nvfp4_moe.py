# SPDX-License-Identifier: Apache-2.0
"""NVFP4 SiTU experts on Hopper: this kernel, Marlin and the floor.

Method: Kimi K3's shapes, seeded random codes, scales, inputs and routing. A CUDA graph
holds one call for each of several routings, so that weights and inputs change between
calls and no call finds its weights in L2; the time is the graph's over the calls,
median over replays. Marlin (``fused_marlin_moe`` with SiTU, one tensor scale for gate
and up) runs on the same codes in the same process. The floor is the larger of touched
experts' bytes over copy bandwidth and arithmetic over the matrix rate, both measured on
an H200 (4.27 TB/s, 790 TFLOP/s); ``--ceilings`` measures them again.

    python benchmarks/kernels/bench_nvfp4_moe.py --json results.json
"""

import argparse
import json
import math
from dataclasses import asdict
from types import SimpleNamespace

import torch
from measure import BANDWIDTH, BF16_RATE, ceilings, error, graph_time, versions

from vllm.model_executor.layers.fused_moe.experts import nvfp4_situ_sm90_ops as ops
from vllm.model_executor.layers.fused_moe.experts.nvfp4_situ_sm90_layout import (
    pack_experts,
)

BETA, LINEAR_BETA = 4.0, 25.0
SHAPES = {  # experts held, per-rank width, choices per token that land here
    "EP8": (112, 3072, 2),
    "TP8": (896, 384, 16),
}
HIDDEN = 3584
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class Layer:
    """Random experts in the checkpoint's form and in each kernel's."""

    def __init__(
        self,
        experts: int,
        width: int,
        hidden: int,
        seed: int,
        shared_scale: bool,
        device: str = "cuda",
    ) -> None:
        gen = torch.Generator(device).manual_seed(seed)
        self.experts, self.width, self.hidden = experts, width, hidden

        def bank(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
            codes = torch.empty(
                experts, rows, columns // 2, dtype=torch.uint8, device=device
            ).random_(0, 256, generator=gen)
            scales = torch.empty(experts, rows, columns // 16, device=device)
            scales.uniform_(0.25, 2, generator=gen)
            return codes, scales.to(torch.float8_e4m3fn)

        self.w13, self.w13_scale = bank(2 * width, hidden)
        self.w2, self.w2_scale = bank(hidden, width)

        def scale(shape: tuple[int, ...], fan: int) -> torch.Tensor:
            # Weights of about 1 / sqrt(fan), so that gate, up and result are near 1.
            u = torch.rand(shape, generator=gen, device=device) + 0.5
            return u * 0.4 / math.sqrt(fan)

        self.alpha13 = scale((experts, 2), hidden)
        if shared_scale:
            self.alpha13[:, 1] = self.alpha13[:, 0]
        self.alpha2 = scale((experts,), width)
        self.gen = gen

    def expert(self, bank: str, e: int) -> torch.Tensor:
        codes, scales = getattr(self, bank)[e], getattr(self, bank + "_scale")[e]
        table = torch.tensor(E2M1, dtype=torch.float64, device=codes.device)
        table = torch.cat([table, -table])
        value = table[torch.stack([codes & 15, codes >> 4], -1).flatten(1).int()]
        value *= scales.double().repeat_interleave(16, 1)
        if bank == "w2":
            return value * self.alpha2[e].double()
        alpha = self.alpha13[e].double().repeat_interleave(self.width)
        return value * alpha[:, None]

    def pack(self) -> None:
        self.packed13 = pack_experts(self.w13, self.w13_scale, gated=True)
        self.packed2 = pack_experts(self.w2, self.w2_scale, gated=False)

    def run(self, case, plan=None, plan2=None, early=True) -> torch.Tensor:
        ops.nvfp4_situ_moe(
            case.out,
            case.x,
            *self.packed13,
            self.alpha13,
            *self.packed2,
            self.alpha2,
            case.weights,
            case.ids,
            case.map,
            case.global_experts,
            BETA,
            LINEAR_BETA,
            case.activation,
            case.rows,
            plan,
            plan2,
            early,
        )
        return case.out

    def marlin(self) -> None:
        from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4

        layer = SimpleNamespace(
            num_experts=self.experts,
            hidden_size=self.hidden,
            intermediate_size_per_partition=self.width,
            params_dtype=torch.bfloat16,
        )
        self.marlin_weights = marlin_utils_fp4.prepare_nvfp4_moe_layer_for_marlin(
            layer,
            self.w13,
            self.w13_scale,
            self.alpha13[:, 0].contiguous(),
            self.w2,
            self.w2_scale,
            self.alpha2,
            True,
        )

    def run_marlin(self, case) -> torch.Tensor:
        from vllm.model_executor.layers.fused_moe.activation import (
            ApplyMoEActivationConfig,
            MoEActivation,
        )
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import (
            fused_marlin_moe,
        )
        from vllm.scalar_type import scalar_types

        w13, w13_scale, alpha13, w2, w2_scale, alpha2 = self.marlin_weights
        return fused_marlin_moe(
            case.x,
            w13,
            w2,
            None,
            None,
            w13_scale,
            w2_scale,
            case.weights,
            case.ids,
            scalar_types.float4_e2m1f.id,
            global_num_experts=case.global_experts,
            activation=MoEActivation.SITU,
            expert_map=case.map,
            global_scale1=alpha13,
            global_scale2=alpha2,
            activation_config=ApplyMoEActivationConfig(
                activation_situ_beta=BETA, activation_situ_linear_beta=LINEAR_BETA
            ),
        )

    def reference(self, case) -> torch.Tensor:
        """The layer in float64 on the dequantised weights."""
        x = case.x.double()
        out = torch.zeros_like(x)
        ids = case.ids.long()
        if case.map is not None:
            ids = torch.where(ids >= 0, case.map.long()[ids.clamp(min=0)], -1)
        for e in ids.unique().tolist():
            if e < 0:
                continue
            token, choice = (ids == e).nonzero(as_tuple=True)
            gate, up = (x[token] @ self.expert("w13", e).T).chunk(2, -1)
            h = BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate)
            h *= LINEAR_BETA * torch.tanh(up / LINEAR_BETA)
            y = h @ self.expert("w2", e).T
            out.index_add_(0, token, y * case.weights[token, choice, None].double())
        return out

    def case(self, tokens: int, choices: int, mapped: bool = False) -> SimpleNamespace:
        """Inputs and routing; with ``mapped``, half of the experts live elsewhere."""
        gen, dev = self.gen, self.w13.device
        total = self.experts * 2 if mapped else self.experts
        score = torch.rand(tokens, total, generator=gen, device=dev)
        ids = score.topk(choices, -1).indices.int()
        expert_map = None
        if mapped:
            ids[:, -1:] = torch.where(
                torch.rand(tokens, 1, generator=gen, device=dev) < 0.3, -1, ids[:, -1:]
            )
            expert_map = torch.full((total,), -1, dtype=torch.int32, device=dev)
            where = torch.randperm(total, generator=gen, device=dev)[: self.experts]
            expert_map[where] = torch.arange(
                self.experts, dtype=torch.int32, device=dev
            )
        weights = torch.rand(tokens, choices, generator=gen, device=dev) + 0.2
        x = torch.randn(tokens, self.hidden, generator=gen, device=dev)
        return SimpleNamespace(
            x=x.bfloat16(),
            ids=ids.contiguous(),
            weights=weights / weights.sum(-1, keepdim=True),
            map=expert_map,
            global_experts=total,
            out=torch.full_like(x, float("nan"), dtype=torch.bfloat16),
            activation=None,
            rows=None,
        )

    def floor(self, case) -> float:
        """Seconds: the larger of bytes over bandwidth and arithmetic over rate."""
        weights = 3 * self.hidden * self.width
        touched = case.ids.unique().numel()
        pairs = case.ids.numel()
        return max(
            touched * weights * 4.5 / 8 / BANDWIDTH, 2 * pairs * weights / BF16_RATE
        )


def scratch(layer: Layer, cases: list[SimpleNamespace]) -> None:
    """One poisoned scratch for all cases, as in an engine."""
    pairs = max(c.ids.numel() for c in cases)
    sizes = ops.workspace_sizes(pairs, layer.width, layer.hidden)
    for name, size in zip(("activation", "rows"), sizes):
        buffer = torch.full(
            (size,), float("nan"), dtype=torch.bfloat16, device=cases[0].x.device
        )
        for c in cases:
            setattr(c, name, buffer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--tokens", nargs="+", type=int, default=list(TOKENS))
    parser.add_argument("--routings", type=int, default=8)
    parser.add_argument("--no-marlin", action="store_true")
    parser.add_argument(
        "--ceilings", action="store_true", help="measure copy and matrix rates as well"
    )
    parser.add_argument("--check", type=int, default=4096, help="most tokens to check")
    parser.add_argument("--commit", help="recorded; asked of git if left out")
    parser.add_argument("--json")
    args = parser.parse_args()
    result: dict = {"method": __doc__, **versions(args.commit), "rows": []}
    if args.ceilings:
        result["ceilings"] = ceilings()
        print(result["ceilings"])
    print(
        "shape tokens  ours us  marlin us  ratio  floor us  of floor  error  marlin's"
    )
    for name in args.shapes:
        experts, width, choices = SHAPES[name]
        layer = Layer(experts, width, HIDDEN, 1, shared_scale=True)
        layer.pack()
        if not args.no_marlin:
            layer.marlin()
        for tokens in args.tokens:
            cases = [layer.case(tokens, choices) for _ in range(args.routings)]
            scratch(layer, cases)
            row = {"shape": name, "tokens": tokens}
            row["plan"] = asdict(ops.plan_for(tokens, choices, experts))
            row["floor_us"] = 1e6 * sum(map(layer.floor, cases)) / len(cases)
            if tokens <= args.check:
                reference = layer.reference(cases[0])
                row["error"] = error(layer.run(cases[0]), reference)
                if not args.no_marlin:
                    row["marlin_error"] = error(layer.run_marlin(cases[0]), reference)
            row["us"] = graph_time(layer.run, cases)
            if not args.no_marlin:
                row["marlin_us"] = graph_time(layer.run_marlin, cases)
            result["rows"].append(row)
            marlin = row.get("marlin_us", math.nan)
            print(
                f"{name:5} {tokens:6} {row['us']:8.1f} {marlin:10.1f} "
                f"{marlin / row['us']:6.2f} {row['floor_us']:9.1f} "
                f"{row['floor_us'] / row['us']:9.2f} {row.get('error', math.nan):.2e} "
                f"{row.get('marlin_error', math.nan):.2e}",
                flush=True,
            )
        del layer
        torch.cuda.empty_cache()
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
