# SPDX-License-Identifier: Apache-2.0
"""Loading a bank of NVFP4 experts: time and peak memory against bytes and plain copies.

Method: a safetensors file with seeded random experts of Kimi K3's size (one layer of one
of eight expert-parallel ranks by default) under the checkpoint's names is read through
vLLM's expert layer, `load_weights` and `process_weights_after_loading`, as an engine
does. Beside it, in the same process and after the same warm-up of the page cache: reading
the file by safetensors to the device and nothing else. Peak memory is the allocator's,
over the bytes of the file. Before, two experts of the same size go the same way: what
an engine pays once, compiling kernels (unless their code is on disk) and first calls, is
`first_use_s`, and not in `process_s`.

    python benchmarks/loading/bench_nvfp4_bank.py --json results.json
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parents[2]))
from benchmarks.kernels.measure import BANDWIDTH, versions
from tests.one_rank import one_rank_groups

FIRST_EXPERTS = 2


def write_bank(path: Path, experts: int, width: int, hidden: int) -> int:
    """Write the experts; their bytes."""
    gen = torch.Generator().manual_seed(0)
    tensors = {}
    for expert in range(experts):
        for shard, (rows, columns) in {"w1": (width, hidden), "w3": (width, hidden), "w2": (hidden, width)}.items():
            base = f"{expert}.{shard}."
            tensors[base + "weight"] = torch.empty(rows, columns // 2, dtype=torch.uint8).random_(0, 256, generator=gen)
            scale = torch.empty(rows, columns // 16, dtype=torch.uint8).random_(40, 80, generator=gen)
            tensors[base + "weight_scale"] = scale.view(torch.float8_e4m3fn)
            tensors[base + "weight_scale_2"] = torch.tensor(2.0 ** -(expert % 5))
            tensors[base + "input_scale"] = torch.tensor(1.0)
    save_file(tensors, path)
    return sum(t.numel() * t.element_size() for t in tensors.values())


def make_layer(index: int, experts: int, width: int, hidden: int):
    from vllm.model_executor.layers.fused_moe.layer import FusedMoEFactory
    from vllm.model_executor.layers.quantization.modelopt import ModelOptNvFp4Config

    return FusedMoEFactory(
        num_experts=experts,
        top_k=2,
        hidden_size=hidden,
        intermediate_size=width,
        scoring_func="sigmoid",
        activation="situ",
        activation_situ_beta=4.0,
        activation_situ_linear_beta=25.0,
        ckpt_names=("w1", "w2", "w3"),
        quant_config=ModelOptNvFp4Config("NVFP4", True, None, [], 16),
        prefix=f"model.layers.{index}.block_sparse_moe.experts",
    ).routed_experts


def tensors_of(path: Path, device: str):
    with safe_open(path, framework="pt", device=device) as file:
        for name in file.keys():  # noqa: SIM118 - a handle is no mapping
            yield name, file.get_tensor(name)


class Meter:
    """Seconds and the allocator's peak bytes of a block."""

    def __init__(self, device: str) -> None:
        self.cuda = device != "cpu"

    def __enter__(self):
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self.before = torch.cuda.memory_allocated()
        self.started = time.perf_counter()
        return self

    def __exit__(self, *_) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - self.started
        self.peak = torch.cuda.max_memory_allocated() - self.before if self.cuda else 0


def through_vllm(path: Path, device: str, index: int, *shape: int):
    """A layer that holds the file, and the meters of building, loading and processing it."""
    with Meter(device) as build:
        layer = make_layer(index, *shape)
    with Meter(device) as load:
        for _ in layer.load_weights(tensors_of(path, "cpu")):
            pass
    with Meter(device) as process:
        layer.quant_method.process_weights_after_loading(layer)
    return layer, build, load, process


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--experts", type=int, default=112)
    parser.add_argument("--width", type=int, default=3072)
    parser.add_argument("--hidden", type=int, default=3584)
    parser.add_argument("--folder", type=Path, help="where the file is written; a temporary folder if left out")
    parser.add_argument("--commit", help="recorded; asked of git if left out")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    from vllm.config import VllmConfig, set_current_vllm_config

    device = "cuda" if torch.cuda.is_available() else "cpu"
    shape = args.experts, args.width, args.hidden
    result: dict = {"method": __doc__, **versions(args.commit), "experts": args.experts}
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        path, first = Path(folder) / "bank.safetensors", Path(folder) / "first.safetensors"
        write_bank(first, FIRST_EXPERTS, *shape[1:])
        size = write_bank(path, *shape)
        path.read_bytes()  # into the page cache
        with Meter(device) as plain:
            held = [tensor.to(device) for _, tensor in tensors_of(path, "cpu")]
        del held
        config = VllmConfig()
        one_rank_groups(config)
        with set_current_vllm_config(config), torch.device(device):
            torch.set_default_dtype(torch.bfloat16)
            *_, first_use = through_vllm(first, device, 0, FIRST_EXPERTS, *shape[1:])
            layer, build, load, process = through_vllm(path, device, 1, *shape)
    resident = sum(p.numel() * p.element_size() for p in layer.parameters())
    result |= {
        "file_bytes": size,
        "resident_over_file": resident / size,
        "backend": layer.quant_method.nvfp4_backend.value,
        "plain_read_s": plain.seconds,
        "build_s": build.seconds,
        "load_s": load.seconds,
        "first_use_s": first_use.seconds,
        "process_s": process.seconds,
        "load_over_plain_read": load.seconds / plain.seconds,
        "process_over_one_copy": process.seconds / (2 * size / BANDWIDTH) if device == "cuda" else None,
        "peak_over_file": (build.peak + max(load.peak, process.peak)) / size if device == "cuda" else None,
    }
    for name, value in result.items():
        if name != "method":
            print(f"{name:22} {value:.3f}" if isinstance(value, float) else f"{name:22} {value}")
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
