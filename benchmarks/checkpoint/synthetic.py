#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Write a checkpoint with Kimi K3's sizes: real configs and headers, data that takes no disk.

Shards are sparse files, so that 1.5 TB fit into about 100 MB; every value reads as zero.

    python benchmarks/checkpoint/synthetic.py OUT [--format mxfp4|nvfp4-modelopt] [--shards 96]
"""

import argparse
import json
import math
import struct
from pathlib import Path

from vllm.checkpoint import compressed, modelopt, tiny
from vllm.checkpoint.formats import CT, dialects
from vllm.checkpoint.headers import DTYPE_BITS
from vllm.checkpoint.tensors import checkpoint_tensors

K3 = tiny.TinyShape(
    hidden=7168,
    layers=tiny.layer_pattern("93"),
    heads=96,
    head_dim=128,
    q_lora=1536,
    dense_width=33792,
    experts=896,
    top_k=16,
    expert_width=3072,
    latent=3584,
    attn_res_block=12,
    vocab=163840,
    min_width_per_rank=None,
)


def stored_tensors(config: dict, format: str) -> tuple[dict[str, tuple[str, tuple[int, ...]]], dict]:
    """Name -> dtype and shape of all stored tensors, and the quantisation config."""
    specs = checkpoint_tensors(config)
    tensors = {}
    for name, spec in specs.items():
        if format == "mxfp4":
            algo = compressed.algorithm(spec.kind, CT + "MXFP4", None)
        else:
            algo = modelopt.algorithm(spec.kind)
        prefix, _, leaf = name.rpartition(".")
        for last, (dtypes, shapes) in dialects(algo, spec.shape, leaf)[0].tensors.items():
            tensors[f"{prefix}.{last}"] = (spec.dtype if algo is None else dtypes[0], shapes[0])
        if algo == "NVFP4":
            tensors[f"{prefix}.input_scale"] = ("F32", ())
    if format == "mxfp4":
        return tensors, compressed.quantization_config(specs, "MXFP4", None)
    return tensors, modelopt.quantization_config(specs)


def write(out: Path, format: str = "mxfp4", shards: int = 96, shape: tiny.TinyShape = K3) -> dict[str, int]:
    """Write the checkpoint; returns its tensors, bytes and shards."""
    out.mkdir(parents=True)
    config = tiny.model_config(shape, "text")
    tensors, config["quantization_config"] = stored_tensors(config, format)
    (out / "config.json").write_text(json.dumps(config, indent=1))
    sizes = {name: math.prod(shape) * DTYPE_BITS[dtype] // 8 for name, (dtype, shape) in tensors.items()}
    total, seen = sum(sizes.values()), 0
    headers: list[dict] = [{} for _ in range(shards)]
    ends, weight_map = [0] * shards, {}
    for name, (dtype, shape) in tensors.items():
        shard = min(shards - 1, seen * shards // total)
        seen += sizes[name]
        end = ends[shard] + sizes[name]
        headers[shard][name] = {"dtype": dtype, "shape": shape, "data_offsets": [ends[shard], end]}
        ends[shard] = end
        weight_map[name] = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
    for number, (header, end) in enumerate(zip(headers, ends, strict=True), 1):
        text = json.dumps({"__metadata__": {"format": "pt"}, **header}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with open(out / f"model-{number:05d}-of-{shards:05d}.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(8 + len(text) + end)
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return {"tensors": len(tensors), "bytes": total, "shards": shards}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--format", choices=("mxfp4", "nvfp4-modelopt"), default="mxfp4")
    parser.add_argument("--shards", type=int, default=96)
    options = parser.parse_args()
    print(json.dumps(write(options.out, options.format, options.shards)))
