# SPDX-License-Identifier: Apache-2.0
"""What a Kimi K3 checkpoint should hold, according to its config files alone."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.checkpoint import compressed_layout
from vllm.checkpoint.errors import CheckpointError
from vllm.checkpoint.formats import CT
from vllm.checkpoint.fused_modules import FusedModule, fused_modules, fused_modules_in, packed_modules_mapping
from vllm.checkpoint.headers import read_json
from vllm.checkpoint.tensors import MULTIMODAL_ARCH, TEXT_ARCH, TensorSpec, checkpoint_tensors
from vllm.model_executor.layers.quantization.utils import modelopt_names

__all__ = ["Model", "is_kimi_k3", "read_model"]

# Methods whose config compressed_layout reads, and how their layouts are marked here.
COMPRESSED = ("compressed-tensors", "mxfp4")
# Far above any real model; a config that asks for more would keep us busy for hours.
MOST = {
    "num_hidden_layers": 2000,
    "num_experts": 20_000,
    "vt_num_hidden_layers": 2000,
    "moe_intermediate_size": 1 << 24,
    "min_moe_intermediate_per_partition": 1 << 24,
}


@dataclass(frozen=True)
class Model:
    """A checkpoint's config, read.

    Attributes:
        config: ``config.json``.
        text: Its text config.
        quant: ``quantization_config``, wherever it stood.
        specs: Unquantised tensors; expert 0 stands for its bank.
        experts: Routed experts per layer.
        algos: Weight name (of `specs`) to algorithm, quantised weights only; None if
            this module does not know the quantisation method.
        fused: Fused modules that the engine will build, by full name.
        refused: Why the engine cannot run the config, if it cannot.
    """

    folder: Path
    config: dict[str, Any]
    text: dict[str, Any]
    quant: dict[str, Any] | None
    specs: dict[str, TensorSpec]
    experts: int
    algos: dict[str, str] | None
    fused: dict[str, FusedModule]
    refused: tuple[str, ...] = ()

    @property
    def method(self) -> str:
        """``quant_method`` and, where the config has one, the overall algorithm."""
        if not self.quant:
            return "unquantised"
        extra = self.quant.get("quant_algo") or self.quant.get("format")
        return f"{self.quant.get('quant_method')}, {extra}" if extra else str(self.quant.get("quant_method"))


def is_kimi_k3(config: Mapping[str, Any]) -> bool:
    """Whether ``config.json`` describes one of the two classes."""
    architectures = config.get("architectures")
    return isinstance(architectures, list) and bool({TEXT_ARCH, MULTIMODAL_ARCH}.intersection(map(str, architectures)))


def read_model(folder: Path, quantization: str | None = None) -> Model:
    """Read a checkpoint's config files.

    Args:
        folder: The checkpoint.
        quantization: What ``--quantization`` asks for.

    Raises:
        CheckpointError: No Kimi K3, a value missing or of a wrong type, config files
            that disagree, or `quantization` that contradicts them.
    """
    config = read_json(folder / "config.json")
    if not is_kimi_k3(config):
        raise CheckpointError(
            f"{folder}: config.json has architectures {config.get('architectures')!r}; expected {TEXT_ARCH} or "
            f"{MULTIMODAL_ARCH}."
        )
    try:
        return _read(folder, config, quantization)
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from None
    except (TypeError, KeyError, AttributeError, ArithmeticError, MemoryError) as error:
        raise CheckpointError(
            f"{folder}: config.json has a value of a wrong type ({type(error).__name__}: {error}). Take config.json "
            "from the checkpoint that the weights belong to."
        ) from None


def _read(folder: Path, config: dict[str, Any], quantization: str | None) -> Model:
    text = config.get("text_config") or config
    for part in (text, config.get("vision_config") or {}):
        for key, most in MOST.items():
            value = part.get(key, 0)
            if value is None and key == "num_experts":  # a model without
                continue
            if type(value) is not int or not 0 <= value <= most:
                raise ValueError(f"config: '{key}' is {value!r}; expected a number up to {most}.")
    specs = checkpoint_tensors(config, experts=1)
    for name, spec in specs.items():
        if not all(type(n) is int and 0 < n < 1 << 32 for n in spec.shape):
            raise ValueError(f"config: its sizes give {name} the shape {list(spec.shape)}.")
    quant = _quantization_config(folder, config, text)
    _check_method(quant, quantization)
    linears = [name.removesuffix(".weight") for name, spec in specs.items() if len(spec.shape) == 2]
    algos: dict[str, str] | None
    refused: tuple[str, ...] = ()
    method = str((quant or {}).get("quant_method", "modelopt"))
    if method in COMPRESSED:
        algos = {name: f"{CT}{layout}" for name, layout in compressed_layout.layouts(specs, quant or {}).items()}
    elif method.startswith("modelopt"):
        fused = fused_modules(
            full_rank_gate=bool(text["linear_attn_config"].get("use_full_rank_gate", False)),
            low_rank_query=text.get("q_lora_rank") is not None,
        )
        algos, refused = _algorithms(specs, quant or {}, packed_modules_mapping(fused))
    else:
        algos = None
    return Model(
        folder=folder,
        config=config,
        text=text,
        quant=quant,
        specs=specs,
        experts=int(text.get("num_experts") or 0),
        algos=algos,
        fused=fused_modules_in(linears),
        refused=refused,
    )


def _quantization_config(
    folder: Path, config: Mapping[str, Any], text: Mapping[str, Any]
) -> dict[str, Any] | None:
    """From config.json, else from hf_quant_config.json; both must agree."""
    here = config.get("quantization_config") or text.get("quantization_config")
    beside = folder / "hf_quant_config.json"
    there = read_json(beside).get("quantization") if beside.exists() else None
    if here is None:
        return None if there is None else {"quant_method": "modelopt", **there}
    for key in ("quant_algo", "quantized_layers"):
        if there and key in there and key in here and there[key] != here[key]:
            raise CheckpointError(
                f"{folder}: config.json and hf_quant_config.json disagree about {key}. Keep the file that "
                "belongs to the weights and remove the other."
            )
    return here


def _check_method(quant: Mapping[str, Any] | None, asked: str | None) -> None:
    if asked is None:
        return
    found = quant.get("quant_method") if quant else None
    family = "modelopt" if str(found).startswith("modelopt") else found
    if asked == "mxfp4" and (quant or {}).get("format") == "mxfp4-pack-quantized":
        return  # vLLM serves the native file under that name
    if asked != found and not (family == "modelopt" and asked.startswith("modelopt")):
        raise ValueError(
            f"--quantization {asked} contradicts the checkpoint, whose quant_method is {found!r}. "
            "Leave the option out; the file says how it is quantised."
        )


def _algorithms(
    specs: Mapping[str, TensorSpec], quant: Mapping[str, Any], packed: dict[str, list[str]]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Weight name -> algorithm, of the quantised weights, and contradictions.

    Raises:
        ValueError: An unknown algorithm, or a listed layer that the model lacks.
    """
    weights = {name: name.removesuffix(".weight") for name, spec in specs.items() if len(spec.shape) == 2}
    if not quant:
        return {}, ()
    overall = str(quant.get("quant_algo")).upper()
    fused = fused_modules_in(weights.values())
    refused = []
    if overall != "MIXED_PRECISION":
        modelopt_names.check_algo("quantization_config", overall)
        excluded = tuple(quant.get("exclude_modules") or quant.get("ignore") or ())

        def asks(module: str) -> str | None:
            return None if modelopt_names.is_excluded(module, excluded, packed) else overall

    else:
        table = modelopt_names.canonical_table(quant.get("quantized_layers") or {})
        for name, listed in table.items():
            modelopt_names.check_algo(name, listed)

        def asks(module: str) -> str | None:
            return modelopt_names.find_algo(module, table, packed)

        modules = {modelopt_names.canonical_name(module) for module in weights.values()}
        modules |= {module[: module.index(".experts.")] + ".experts" for module in modules if ".experts." in module}
        for name in table:
            shards = modelopt_names.shards_of(name, packed)
            if name not in modules and not any(shard in modules for shard in shards):
                raise ValueError(
                    f"quantized_layers names {name}, which this model does not have. The config belongs to other "
                    "weights, or its names need another prefix."
                )
    found = {name: algo for name, module in weights.items() if (algo := asks(module)) is not None}
    for module, parts in fused.items():
        # A fused module's own key stands for all its shards.
        parent = module.rpartition(".")[0]
        try:
            algo = asks(module)
        except ValueError as error:
            refused.append(str(error))
            continue
        if algo is not None:
            found.update((f"{parent}.{shard}.weight", algo) for shard in parts.shards)
    return found, tuple(refused)
