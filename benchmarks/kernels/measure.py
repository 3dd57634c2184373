# SPDX-License-Identifier: Apache-2.0
"""What the kernel benchmarks share: timing by CUDA graphs, ceilings, versions."""

import statistics
import subprocess
import time
from collections.abc import Callable, Iterable

import torch

BANDWIDTH = 4.27e12  # bytes/s, read plus written, of an H200
BF16_RATE, FP8_RATE = 790e12, 1580e12  # FLOP/s: measured, and twice that


def graph_time(run: Callable, cases: Iterable, replays: int = 9) -> float:
    """Median microseconds of one call inside a CUDA graph over all cases."""
    cases = list(cases)
    for case in cases[:2]:
        run(case)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for case in cases:
            run(case)
    graph.replay()
    times = []
    for _ in range(replays):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e3 / len(cases))
    return statistics.median(times)


def error(out: torch.Tensor, reference: torch.Tensor) -> float:
    """Relative error ‖out − reference‖ / ‖reference‖."""
    return ((out.double() - reference).norm() / reference.norm()).item()


def ceilings() -> dict[str, float]:
    """Copy bandwidth (bytes/s, read plus written) and bf16 matrix rate (FLOP/s)."""

    def median(run: Callable, n: int = 7) -> float:
        run()
        times = []
        for _ in range(n):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            stop.synchronize()
            times.append(start.elapsed_time(stop) / 1e3)
        return statistics.median(times)

    source = torch.empty(2 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    copy = 2 * source.numel() / median(lambda: target.copy_(source))
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return {"copy": copy, "matmul": 2 * 8192**3 / median(lambda: a @ b)}


def versions(commit: str | None = None) -> dict[str, str]:
    """Device, driver, versions, date, and the commit, asked of git if not given."""
    import vllm

    found = {"torch": torch.__version__, "vllm": vllm.__version__, "date": time.strftime("%Y-%m-%d")}
    if commit is None:
        git = ["git", "describe", "--always", "--dirty"]
        commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
    if torch.cuda.is_available():
        import triton

        smi = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        name, driver = subprocess.check_output(smi, text=True).strip().split("\n")[0].split(", ")
        cuda = str(torch.version.cuda)
        found |= {"device": name, "driver": driver, "cuda": cuda, "triton": triton.__version__}
    else:
        found["device"] = "cpu"
    return {"commit": commit, **found}
