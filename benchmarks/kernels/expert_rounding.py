# SPDX-License-Identifier: Apache-2.0
"""What the roundings of an expert kernel alone cost, without the kernel.

Method: a layer of NVFP4 SiTU experts with random codes, block and tensor scales and a
seeded routing, in float64 on the CPU. The same arithmetic is repeated with values put
through BF16 where a kernel keeps them in BF16; reported is ‖out − ref‖/‖ref‖. Measured
errors of the kernels themselves are in ``benchmarks/results/nvfp4_moe_h200.json``: this
says which roundings explain them.

    python benchmarks/exactness/expert_rounding.py --json rounding.json
"""

import argparse
import json
import math
from collections.abc import Callable
from pathlib import Path

import torch

BETA, LINEAR_BETA = 4.0, 25.0
LEVELS = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
HIDDEN, WIDTH, EXPERTS, TOKENS = 1792, 768, 32, 64


def bf16(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().double()


def exact(x: torch.Tensor) -> torch.Tensor:
    return x


# Where a kernel rounds to BF16: gate and up before SiTU, the second GEMM's input, its rows,
# the routing weights, and rows times weights. The result of a layer is BF16 with all.
KERNELS: dict[str, tuple[Callable, ...]] = {
    "result only": (exact, exact, exact, exact, exact),
    "this fork": (exact, bf16, bf16, exact, exact),
    "Marlin": (bf16, bf16, bf16, bf16, bf16),
}


class Layer:
    def __init__(self, seed: int = 0) -> None:
        self.gen = torch.Generator().manual_seed(seed)
        self.gate, self.up = self.bank(WIDTH, HIDDEN), self.bank(WIDTH, HIDDEN)
        self.down = self.bank(HIDDEN, WIDTH)

    def bank(self, rows: int, columns: int) -> torch.Tensor:
        """Dequantised weights of about 1/sqrt(columns), float64 ``[experts, rows, columns]``."""
        codes = torch.randint(0, 16, (EXPERTS, rows, columns), generator=self.gen)
        scale = torch.rand(EXPERTS, rows, columns // 16, generator=self.gen) * 1.75 + 0.25
        tensor = (torch.rand(EXPERTS, 1, 1, generator=self.gen) + 0.5) * 0.4 / math.sqrt(columns)
        value = torch.cat([LEVELS, -LEVELS])[codes]
        value *= scale.to(torch.float8_e4m3fn).double().repeat_interleave(16, -1)
        return value.mul_(tensor.double())

    def run(self, x, weights, ids, roundings) -> torch.Tensor:
        """Float64 ``[tokens, hidden]``; ``roundings`` as in ``KERNELS``."""
        gate_up, activation, row, weight, weighted = roundings
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            token, choice = (ids == expert).nonzero(as_tuple=True)
            g, u = gate_up(x[token] @ self.gate[expert].T), gate_up(x[token] @ self.up[expert].T)
            h = BETA * torch.tanh(g / BETA) * torch.sigmoid(g) * LINEAR_BETA * torch.tanh(u / LINEAR_BETA)
            y = row(activation(h) @ self.down[expert].T)
            out.index_add_(0, token, weighted(y * weight(weights[token, choice])[:, None]))
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(2)
    layer, rows = Layer(), []
    for choices in (2, 16):
        x = bf16(torch.randn(TOKENS, HIDDEN, generator=layer.gen))
        weights, ids = torch.rand(TOKENS, EXPERTS, generator=layer.gen).topk(choices)
        weights = (weights / weights.sum(-1, keepdim=True)).double()
        want = layer.run(x, weights, ids, (exact,) * 5)
        for name, roundings in KERNELS.items():
            error = (bf16(layer.run(x, weights, ids, roundings)) - want).norm() / want.norm()
            rows.append({"choices": choices, "kernel": name, "error": error.item()})
            print(f"top-{choices:<3} {name:12} {error.item():.2e}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"method": __doc__, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
