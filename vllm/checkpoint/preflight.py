# SPDX-License-Identifier: Apache-2.0
"""Checks of a Kimi K3 checkpoint before any weight is allocated, from headers alone."""

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from vllm.checkpoint import compressed_layout
from vllm.checkpoint.errors import CheckpointError, one_error
from vllm.checkpoint.headers import Entry, read_headers
from vllm.checkpoint.tensors import MULTIMODAL_ARCH, TEXT_ARCH, TEXT_PREFIX, TensorSpec, checkpoint_tensors
from vllm.model_executor.layers.quantization.utils import modelopt_names

__all__ = ["check_before_serving", "check_checkpoint"]

FLOATS = ("BF16", "F16", "F32")
# Methods whose config compressed_layout reads, and how their layouts are marked here.
COMPRESSED = ("compressed-tensors", "mxfp4")
CT = "compressed-tensors "
# What a checkpoint may hold beside the model: scales of the KV cache.
BESIDE = ("k_scale", "v_scale")


def check_before_serving(args: Any) -> None:
    """Check the checkpoint that an engine is about to be built for.

    Other models, hub names and dummy weights pass unread.

    Args:
        args: vLLM's EngineArgs.

    Raises:
        CheckpointError: What would not load, in one message.
    """
    folder = Path(args.model)
    if args.load_format != "dummy" and (folder / "config.json").is_file():
        check_checkpoint(folder, args.tensor_parallel_size, args.quantization)


def check_checkpoint(folder: Path, tensor_parallel_size: int = 1, quantization: str | None = None) -> None:
    """Compare config, index and headers of `folder` with what Kimi K3 needs.

    Raises:
        CheckpointError: What would not load, in one message. A folder of another
            architecture passes.
    """
    config = _read_json(folder / "config.json")
    if not {TEXT_ARCH, MULTIMODAL_ARCH} & set(config.get("architectures") or ()):
        return
    text = config.get("text_config") or config
    try:
        specs = checkpoint_tensors(config)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    _check_heads(folder, text, tensor_parallel_size)
    quant = _quantization_config(folder, config, text)
    _check_method(folder, quant, quantization)
    method = str((quant or {}).get("quant_method", "modelopt"))
    if method not in COMPRESSED and not method.startswith("modelopt"):
        read_headers(folder)  # other formats: files and index only
        return
    try:
        if method in COMPRESSED:
            algos = {name: f"{CT}{layout}" for name, layout in compressed_layout.layouts(specs, quant or {}).items()}
        else:
            algos = _algorithms(specs, quant or {})
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    problems = list(_compare(specs, algos, read_headers(folder), text["num_hidden_layers"]))
    if problems:
        raise one_error(f"{folder}: {len(problems)} tensors do not fit the config:", problems)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path}: is no JSON ({error}).") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds no JSON object.")
    return content


def _check_heads(folder: Path, text: Mapping[str, Any], tp: int) -> None:
    counts = {
        "num_attention_heads": text["num_attention_heads"],
        "linear_attn_config.num_heads": text["linear_attn_config"]["num_heads"],
    }
    for key, heads in counts.items():
        if heads % tp:
            fits = [n for n in range(1, heads + 1) if heads % n == 0]
            raise CheckpointError(
                f"{folder}: tensor parallel size {tp} does not divide {key} = {heads}; sizes that do: {fits}."
            )


def _quantization_config(
    folder: Path, config: Mapping[str, Any], text: Mapping[str, Any]
) -> dict[str, Any] | None:
    """From config.json, else from hf_quant_config.json; both must agree."""
    here = config.get("quantization_config") or text.get("quantization_config")
    beside = folder / "hf_quant_config.json"
    there = _read_json(beside).get("quantization") if beside.exists() else None
    if here is None:
        return None if there is None else {"quant_method": "modelopt", **there}
    for key in ("quant_algo", "quantized_layers"):
        if there and key in there and key in here and there[key] != here[key]:
            raise CheckpointError(
                f"{folder}: config.json and hf_quant_config.json disagree about {key}. Keep the file that "
                "belongs to the weights and remove the other."
            )
    return here


def _check_method(folder: Path, quant: Mapping[str, Any] | None, asked: str | None) -> None:
    if asked is None:
        return
    found = quant.get("quant_method") if quant else None
    family = "modelopt" if str(found).startswith("modelopt") else found
    if asked == "mxfp4" and (quant or {}).get("format") == "mxfp4-pack-quantized":
        return  # vLLM serves the native file under that name
    if asked != found and not (family == "modelopt" and asked.startswith("modelopt")):
        raise CheckpointError(
            f"{folder}: --quantization {asked} contradicts the checkpoint, whose quant_method is {found!r}. "
            "Leave the option out; the file says how it is quantised."
        )


def _algorithms(specs: Mapping[str, TensorSpec], quant: Mapping[str, Any]) -> dict[str, str]:
    """Weight name -> algorithm, of the quantised weights.

    Raises:
        ValueError: An unknown algorithm, or a listed layer that the model lacks.
    """
    weights = {name: name.removesuffix(".weight") for name, spec in specs.items() if len(spec.shape) == 2}
    if not quant:
        return {}
    overall = str(quant.get("quant_algo")).upper()
    if overall != "MIXED_PRECISION":
        modelopt_names.check_algo("quantization_config", overall)
        excluded = quant.get("exclude_modules") or quant.get("ignore") or ()
        return {
            name: overall for name, module in weights.items() if not modelopt_names.is_excluded(module, excluded, {})
        }
    table = modelopt_names.canonical_table(quant.get("quantized_layers") or {})
    for name, algo in table.items():
        modelopt_names.check_algo(name, algo)
    found = {}
    for name, module in weights.items():
        listed = modelopt_names.find_algo(module, table, {})
        if listed is not None:
            found[name] = listed
    modules = {modelopt_names.canonical_name(module) for module in weights.values()}
    modules |= {module[: module.index(".experts.")] + ".experts" for module in modules if ".experts." in module}
    for name in table:
        shards = modelopt_names.shards_of(name, {})
        if name not in modules and not any(shard in modules for shard in shards):
            raise ValueError(
                f"quantized_layers names {name}, which this model does not have. The config belongs to other weights, "
                "or its names need another prefix."
            )
    return found


def _stored(
    name: str, spec: TensorSpec, algo: str | None
) -> list[dict[str, tuple[tuple[str, ...], list[tuple]]]] | None:
    """What a file holds for one weight: alternatives of name -> (dtypes, shapes).

    None for an algorithm whose tensors are not described here.
    """
    prefix = name.removesuffix("weight")
    if algo is not None and algo.startswith(CT):
        only = compressed_layout.stored(name, spec, algo.removeprefix(CT))
        return None if only is None else [only]
    if algo == "NVFP4":
        out, inp = spec.shape
        return [
            {
                name: (("U8",), [(out, inp // 2)]),
                f"{prefix}weight_scale": (("F8_E4M3",), [(out, inp // 16)]),
                f"{prefix}weight_scale_2": (("F32",), [(), (1,)]),
            }
        ]
    if algo == "FP8_PB_WO":
        rows, columns = (math.ceil(n / 128) for n in spec.shape)
        weight = {name: (("F8_E4M3",), [spec.shape])}
        return [
            {**weight, f"{prefix}weight_scale": (("F32",), [(rows, 1, columns, 1), (rows, columns)])},
            {**weight, f"{prefix}weight_scale_inv": (("F32",), [(rows, columns)])},
        ]
    return [{name: (FLOATS, [spec.shape])}] if algo is None else None


def _compare(
    specs: Mapping[str, TensorSpec], algos: Mapping[str, str], entries: Mapping[str, Entry], layers: int
) -> Iterator[str]:
    """Problems of the stored tensors, one sentence each."""
    taken: set[str] = set()
    input_scales = {name.rpartition(".")[2] for name in entries if name.endswith(("input_scale", "input_global_scale"))}
    for name, spec in specs.items():
        algo = algos.get(name)
        choices = _stored(name, spec, algo)
        if choices is None:
            taken.update(n for n in entries if n.startswith(name.removesuffix("weight")))
            continue
        choice = next((c for c in choices if all(n in entries for n in c)), choices[0])
        # A weight-only file has no input scales; any other has one for every expert.
        input_scale = {"NVFP4": "input_scale", CT + "NVFP4": "input_global_scale"}.get(algo or "")
        if input_scale in input_scales:
            choice = {**choice, f"{name.removesuffix('weight')}{input_scale}": (("F32",), [(), (1,)])}
        says = f" (the config says {algo})" if algo else " (the config says not quantised)"
        for stored, (dtypes, shapes) in choice.items():
            taken.add(stored)
            entry = entries.get(stored)
            if entry is None:
                yield f"{stored}: missing; expected {'/'.join(dtypes)} {list(shapes[0])}{says}"
                continue
            if entry.dtype not in dtypes:
                yield f"{stored} in {entry.file}: dtype {entry.dtype}, expected {' or '.join(dtypes)}{says}"
            if entry.shape not in shapes and not _longer_on(spec.zero_tail_axis, entry.shape, shapes[0]):
                yield f"{stored} in {entry.file}: shape {list(entry.shape)}, expected {list(shapes[0])}{says}"
    for name, entry in entries.items():
        if name not in taken and not _beside(name, layers):
            yield f"{name} in {entry.file}: the model has no such tensor"


def _longer_on(axis: int | None, shape: tuple[int, ...], want: tuple[int, ...]) -> bool:
    return axis is not None and len(shape) == len(want) and all(
        n >= w if i == axis else n == w for i, (n, w) in enumerate(zip(shape, want))
    )


def _beside(name: str, layers: int) -> bool:
    """KV-cache scales, rotary tables, and draft layers behind the last one."""
    parts = name.removeprefix(TEXT_PREFIX).split(".")
    draft = parts[:2] == ["model", "layers"] and parts[2].isdigit() and int(parts[2]) >= layers
    return draft or parts[-1] in BESIDE or "rotary_emb" in parts
