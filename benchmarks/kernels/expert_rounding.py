# SPDX-License-Identifier: Apache-2.0
"""What the roundings of an expert kernel alone cost, without the kernel.

Method: a small layer of `bench_nvfp4_moe.py`, in float64 on the CPU. The same arithmetic
is repeated with values put through BF16 where a kernel keeps them in BF16; reported is
‖out − ref‖/‖ref‖. Measured errors of the kernels themselves are in
``benchmarks/results/nvfp4_moe_h200.json``: this says which roundings explain them.

    python benchmarks/kernels/expert_rounding.py --json rounding.json
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from bench_nvfp4_moe import BETA, LINEAR_BETA, Layer
from measure import error

EXPERTS, WIDTH, HIDDEN, TOKENS = 32, 768, 1792, 64


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


def rounded(layer: Layer, case: SimpleNamespace, roundings: tuple[Callable, ...]) -> torch.Tensor:
    """``Layer.reference`` with ``roundings`` as in ``KERNELS``; float64 ``[tokens, hidden]``."""
    gate_up, activation, row, weight, weighted = roundings
    x = case.x.double()
    out = torch.zeros_like(x)
    for expert in range(layer.experts):
        token, choice = (case.ids == expert).nonzero(as_tuple=True)
        gate, up = gate_up(x[token] @ layer.expert("w13", expert).T).chunk(2, -1)
        h = BETA * torch.tanh(gate / BETA) * torch.sigmoid(gate) * LINEAR_BETA * torch.tanh(up / LINEAR_BETA)
        y = row(activation(h) @ layer.expert("w2", expert).T)
        out.index_add_(0, token, weighted(y * weight(case.weights[token, choice, None].double())))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(2)
    layer, rows = Layer(EXPERTS, WIDTH, HIDDEN, 1, shared_scale=True, device="cpu"), []
    for choices in (2, 16):
        case = layer.case(TOKENS, choices)
        want = layer.reference(case)
        for name, roundings in KERNELS.items():
            found = error(bf16(rounded(layer, case, roundings)), want)
            rows.append({"choices": choices, "kernel": name, "error": found})
            print(f"top-{choices:<3} {name:12} {found:.2e}", flush=True)
    if args.json:
        args.json.write_text(json.dumps({"method": __doc__, "torch": torch.__version__, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
