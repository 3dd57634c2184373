# SPDX-License-Identifier: Apache-2.0
"""Run the FP8 kernel for few tokens in Triton's interpreter, against float64.

Run as a program in a fresh process, since the interpreter is chosen when triton is
first imported:

    TRITON_INTERPRET=1 python few_tokens_oracle.py    # JSON: case -> relative error
"""

import importlib.util
import json
import math
import os
import sys
from pathlib import Path
from types import ModuleType

import torch
import triton
import triton.language as tl

FILE = "model_executor/kernels/linear/scaled_mm/block_fp8_few_tokens.py"
CASES = [  # tokens, rows, columns, multiprocessors: one share, equal ones, a short last
    (1, 128, 128, 1),
    (3, 256, 1024, 4),
    (16, 384, 896, 8),
    (17, 256, 1152, 4),
    (64, 256, 640, 8),
]


def load_kernel() -> ModuleType:
    """The kernel file by path: vLLM puts a placeholder in triton's place without a GPU."""
    stand_in = ModuleType("vllm.triton_utils")
    stand_in.triton, stand_in.tl = triton, tl
    sys.modules["vllm.triton_utils"] = stand_in
    package = importlib.util.find_spec("vllm")
    if package is None or not package.submodule_search_locations:
        raise ModuleNotFoundError("vllm is not importable; its kernel file is needed")
    path = Path(package.submodule_search_locations[0]) / FILE
    spec = importlib.util.spec_from_file_location("few_tokens", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["few_tokens"] = module
    spec.loader.exec_module(module)
    return module


def e4m3(code: int) -> float:
    """The value of a code: 1 sign, 4 exponent, 3 mantissa bits."""
    exponent, mantissa = code >> 3 & 15, code & 7
    value = (1 + mantissa / 8) * 2.0 ** (exponent - 7) if exponent else mantissa / 8 * 2.0**-6
    return -value if code & 128 else value


def inputs(tokens: int, rows: int, columns: int) -> dict[str, torch.Tensor]:
    """Codes of every kind, a different scale per block, and x as columns of a wider tensor."""
    gen = torch.Generator().manual_seed(rows + columns + tokens)
    codes = torch.randint(0, 127, (rows, columns), generator=gen)
    codes += 128 * torch.randint(0, 2, codes.shape, generator=gen)
    blocks = rows // 128, columns // 128
    scale = 2.0 ** -(torch.arange(math.prod(blocks)) * 5 % 11 + 6.0).view(blocks)
    wide = torch.randn(tokens, columns + 128, generator=gen).bfloat16()
    return {"x": wide[:, :columns], "codes": codes, "scale": scale}


def reference(x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([e4m3(c) for c in range(256)], dtype=torch.float64, device=codes.device)
    weight = table[codes] * scale.double().repeat_interleave(128, 0).repeat_interleave(128, 1)
    return x.double() @ weight.T


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") != "1":
        sys.exit("set TRITON_INTERPRET=1: the kernel runs on CPU tensors.")
    kernel = load_kernel()
    empty = torch.empty
    torch.empty = lambda *a, **k: empty(*a, **k).fill_(math.nan)  # parts nobody wrote
    worst = {}
    for tokens, rows, columns, multiprocessors in CASES:
        case = inputs(tokens, rows, columns)
        plan = kernel.few_tokens_plan(tokens, rows, columns, multiprocessors)
        arrivals = torch.zeros(rows // plan.rows, dtype=torch.int32)
        weight = case["codes"].to(torch.uint8).view(torch.float8_e4m3fn)
        args = (case["x"], weight, case["scale"], arrivals, plan, False)
        out = [kernel.block_fp8_few_tokens(*args) for _ in range(2)]
        assert torch.equal(*out) and not arrivals.any(), "a second call differs"
        want = reference(**case)
        error = ((out[0].double() - want).norm() / want.norm()).item()
        worst[f"{tokens} tokens, {rows}x{columns}, {plan.split} shares"] = error
    print(json.dumps(worst))


if __name__ == "__main__":
    main()
