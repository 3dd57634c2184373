# SPDX-License-Identifier: Apache-2.0
"""Write a tiny random Kimi K3 checkpoint with the real tensor names and layout.

The weights mean nothing, but they are conditioned like a trained model's: log-probs
spread over several nats, experts are used unevenly, decays differ per channel, no
tensor is constant. A tensor's values depend on the seed and its name alone, so the
BF16 and the quantised checkpoint of one seed are two encodings of the same model.
"""

import hashlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from vllm.checkpoint import compressed, modelopt, tiny_tokenizer, tiny_vision
from vllm.checkpoint.errors import CheckpointError
from vllm.checkpoint.tensors import (
    MULTIMODAL_ARCH,
    TEXT_ARCH,
    TensorSpec,
    checkpoint_tensors,
)

__all__ = ["ATTENTIONS", "FORMATS", "Summary", "TinyShape", "make_tiny", "source_tensor"]

# Format -> whether the attention linears are block FP8 in the published layout.
_FP8_ATTENTION = {
    "bf16": False,
    "nvfp4-modelopt": True,
    "nvfp4-ct": False,
    "mxfp4": False,
    "fp8-block-ct": True,
}
FORMATS = tuple(_FP8_ATTENTION)
ATTENTIONS = ("fp8", "bf16")
ARCHITECTURES = {"text": TEXT_ARCH, "multimodal": MULTIMODAL_ARCH}
MAX_SHARD_BYTES = 1 << 30
DTYPE_BYTES = {"BF16": 2, "F32": 4}

# Rows and columns per amplitude of a linear's values: those of FP8_PB_WO and NVFP4,
# so that neighbouring block scales differ and a misplaced one is visible.
LINEAR_BLOCK = (128, 128)
EXPERT_BLOCK = (1, 16)


@dataclass(frozen=True)
class TinyShape:
    """Sizes of a tiny checkpoint.

    Attributes:
        layers: One letter per layer, ``K`` for KDA and ``M`` for MLA. Layer 0 has a
            dense MLP, the others routed experts.
        heads: Attention heads of both kinds.
        head_dim: KDA head width; also the no-rope and the value width of MLA.
        kv_lora, rope: MLA latent and rope slot; the CPU decode kernel is built for
            512 + 64 only, which are 4.5 scale blocks, as in the real model.
        min_width_per_rank: ``min_moe_intermediate_per_partition`` in the config, below
            which 0.28.0 pads a rank's expert width; None leaves the key out.
    """

    hidden: int = 512
    layers: str = "KKMK"
    heads: int = 4
    head_dim: int = 128
    q_lora: int = 256
    kv_lora: int = 512
    rope: int = 64
    dense_width: int = 512
    experts: int = 8
    top_k: int = 2
    expert_width: int = 128
    latent: int = 256
    shared_experts: int = 2
    attn_res_block: int = 2
    vocab: int = 512
    min_width_per_rank: int | None = 32

    def check(self) -> None:
        """Raise `CheckpointError` for sizes that no checkpoint can have."""
        for name, value in asdict(self).items():
            if isinstance(value, int) and value < 1:
                raise CheckpointError(f"--{_flag(name)} is {value}; it must be >= 1.")
        if not self.layers or set(self.layers) - set("KM"):
            raise CheckpointError(
                f"--layers is {self.layers!r}; give one letter per layer, K for KDA "
                "and M for MLA, or a number of layers."
            )
        if "K" not in self.layers or "M" not in self.layers:
            raise CheckpointError(
                f"--layers is {self.layers!r}; vLLM's hybrid cache needs at least one "
                "KDA layer (K) and one MLA layer (M)."
            )
        if self.top_k > self.experts:
            raise CheckpointError(f"--top-k {self.top_k} exceeds --experts {self.experts}.")
        for name in ("hidden", "latent", "expert_width", "dense_width", "q_lora"):
            if getattr(self, name) % 16:
                raise CheckpointError(
                    f"--{_flag(name)} is {getattr(self, name)}; it must be a multiple of 16, the NVFP4 group size."
                )
        if self.vocab < tiny_tokenizer.min_vocab_size():
            raise CheckpointError(
                f"--vocab is {self.vocab}; the tokenizer needs at least {tiny_tokenizer.min_vocab_size()}."
            )


def _flag(name: str) -> str:
    return name.replace("_", "-")


def layer_pattern(layers: str) -> str:
    """Expand ``"4"`` to ``"KKKM"``; letters pass through.

    As in Kimi K3, every fourth layer and the last one are MLA.
    """
    if not layers.isdigit():
        return layers.upper()
    count = int(layers)
    return "".join("M" if n % 4 == 0 or n == count else "K" for n in range(1, count + 1))


def stored_a_log_length(heads: int) -> int:
    """Length of ``A_log`` on disk: the next power of two above `heads`.

    The published checkpoint stores 128 values for 96 heads.
    """
    return 1 << heads.bit_length()


def text_config(shape: TinyShape) -> dict[str, Any]:
    """Text config of a Kimi K3 of this shape, under the published keys."""
    config = {
        "model_type": "kimi_linear",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.dense_width,
        "num_hidden_layers": len(shape.layers),
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "head_dim": shape.head_dim,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "initializer_range": 0.02,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "q_lora_rank": shape.q_lora,
        "kv_lora_rank": shape.kv_lora,
        "qk_nope_head_dim": shape.head_dim,
        "qk_rope_head_dim": shape.rope,
        "v_head_dim": shape.head_dim,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "linear_attn_config": {
            "kda_layers": [i for i, c in enumerate(shape.layers, 1) if c == "K"],
            "full_attn_layers": [i for i, c in enumerate(shape.layers, 1) if c == "M"],
            "num_heads": shape.heads,
            "head_dim": shape.head_dim,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
        "attn_res_block_size": shape.attn_res_block,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "num_experts": shape.experts,
        "num_experts_per_token": shape.top_k,
        "moe_intermediate_size": shape.expert_width,
        "routed_expert_hidden_size": shape.latent,
        "latent_moe_use_norm": True,
        "num_shared_experts": shape.shared_experts,
        "moe_router_activation_func": "sigmoid",
        "moe_renormalize": True,
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "num_nextn_predict_layers": 0,
        "bos_token_id": tiny_tokenizer.token_id("[BOS]", shape.vocab),
        "eos_token_id": tiny_tokenizer.token_id("[EOS]", shape.vocab),
        "pad_token_id": tiny_tokenizer.token_id("[PAD]", shape.vocab),
        "dtype": "bfloat16",
    }
    if shape.min_width_per_rank is not None:
        config["min_moe_intermediate_per_partition"] = shape.min_width_per_rank
    return config


def model_config(shape: TinyShape, arch: str) -> dict[str, Any]:
    """``config.json`` of an unquantised checkpoint of this shape.

    Args:
        shape: Sizes.
        arch: ``"text"`` or ``"multimodal"``.
    """
    text = text_config(shape)
    if arch == "text":
        return {"architectures": [TEXT_ARCH], **text}
    return {
        "architectures": [MULTIMODAL_ARCH],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        **{key: text[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
        **tiny_vision.config_entries(shape.hidden, shape.vocab),
        "text_config": {"architectures": [TEXT_ARCH], **text},
    }


# --- values ---------------------------------------------------------------------------

# Standard deviation of a linear's output for inputs of unit variance, where it is not
# one. Gate and up reach into the region where SiTU's two tanh bend, so that a scale
# folded across the activation changes the output visibly.
_GAIN = {
    "gate_proj": 2.0,
    "up_proj": 4.0,
    "down_proj": 0.4,
    "w1": 2.0,
    "w3": 4.0,
    "w2": 0.4,
    "gate": 2.0,
    "q_b_proj": 1.5,
    "lm_head": 2.0,
    "proj": 1.5,
}
# Amplitudes of experts, cyclic: their tensor scales are different powers of two.
_EXPERT_AMPLITUDE = (1.0, 0.5, 2.0, 0.25)
_BLOCK_SPREAD = 1.0  # amplitudes of blocks lie in 2^±spread


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))


def _block_amplitude(shape: tuple[int, ...], block: tuple[int, int], gen: torch.Generator) -> torch.Tensor:
    """Amplitude per element, constant in a block, mean square one; float32 [out, in]."""
    rows, columns = (math.ceil(n / b) for n, b in zip(shape, block, strict=True))
    grid = torch.exp2((torch.rand(rows, columns, generator=gen) * 2 - 1) * _BLOCK_SPREAD)
    grid /= grid.square().mean().sqrt()
    grid = grid.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return grid[: shape[0], : shape[1]]


def source_tensor(name: str, spec: TensorSpec, seed: int) -> torch.Tensor:
    """Values of one unquantised tensor, in the stored shape and dtype.

    Args:
        name: Tensor name without the multimodal prefix, so that both classes get the
            same language model.
        spec: Its descriptor.
        seed: Seed of the checkpoint.

    Returns:
        BF16 or float32 tensor. ``A_log`` has `stored_a_log_length` values, the surplus
        zero.
    """
    gen = _generator(seed, name)
    family, _, module = spec.kind.partition(".")

    def normal(scale: float = 1.0, mean: float = 0.0) -> torch.Tensor:
        return torch.randn(spec.shape, generator=gen) * scale + mean

    if spec.kind == "kda.A_log":
        heads = spec.shape[0]
        values = torch.zeros(stored_a_log_length(heads))
        values[:heads] = torch.rand(heads, generator=gen) * 1.4 - 0.7
    elif spec.kind == "kda.dt_bias":
        # Decays exp(-5 sigmoid(a)) from about 0.3 to 0.99 per step.
        values = normal(1.0, -1.5)
    elif spec.kind == "kda.conv1d":
        values = normal(0.5)
    elif spec.kind == "moe.e_score_correction_bias":
        values = normal(0.1)
    elif spec.kind == "embedding":
        values = normal()
    elif spec.kind == "vision.pos_emb":
        values = normal(0.2)
    elif len(spec.shape) == 1:  # norms
        values = normal(0.2, 1.0).clamp_(min=0.2)
    else:
        fan_in = math.prod(spec.shape[1:])
        values = normal(_GAIN.get(module or family, 1.0) / math.sqrt(fan_in))
        if family == "expert":
            expert = int(name.split(".experts.")[1].split(".")[0])
            values *= _EXPERT_AMPLITUDE[expert % len(_EXPERT_AMPLITUDE)]
            values *= _block_amplitude(spec.shape, EXPERT_BLOCK, gen)
        elif family in ("kda", "mla"):
            values *= _block_amplitude(spec.shape, LINEAR_BLOCK, gen)
    return values.to(torch.bfloat16 if spec.dtype == "BF16" else torch.float32)


def _given_tensor(name: str, spec: TensorSpec, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A tensor of the caller's, if it is what the descriptor says."""
    shape = spec.shape if spec.zero_tail_axis is None else (stored_a_log_length(spec.shape[0]),)
    dtype = torch.bfloat16 if spec.dtype == "BF16" else torch.float32
    given = weights.get(name)
    if given is None or tuple(given.shape) != shape or given.dtype != dtype:
        found = "missing" if given is None else f"{given.dtype} {list(given.shape)}"
        raise CheckpointError(f"weights: {name} is {found}, expected {dtype} {list(shape)} for this TinyShape.")
    return given


# --- encodings ------------------------------------------------------------------------

# (name, source lookup) -> stored tensors; the name is that of the unquantised tensor.
Encoder = Callable[[str, TensorSpec, Callable[[str], torch.Tensor]], dict]


def _encode_bf16(name: str, spec: TensorSpec, source: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: source(name)}


def _encoding(
    format: str, attention: str | None, specs: Mapping[str, TensorSpec], w3_scale_ratio: float
) -> tuple[Encoder, dict[str, Any] | None]:
    """Encoder and ``quantization_config`` of a format.

    Raises:
        CheckpointError: Unknown names, a combination that no format has, or a
            library that is missing.
    """
    if format not in FORMATS:
        raise CheckpointError(f"format {format!r} is unknown; use one of {FORMATS}.")
    if attention not in (None, *ATTENTIONS):
        raise CheckpointError(f"attention {attention!r} is unknown; use one of {ATTENTIONS}.")
    fp8 = _FP8_ATTENTION[format] if attention is None else attention == "fp8"
    if (format, fp8) in (("bf16", True), ("fp8-block-ct", False)):
        other = {"bf16": "fp8-block-ct", "fp8-block-ct": "bf16"}[format]
        raise CheckpointError(f"format {format} with {attention} attention is the format {other}; ask for that.")
    if format == "bf16":
        return _encode_bf16, None
    try:
        if format == "nvfp4-modelopt":
            algo = "FP8_PB_WO" if fp8 else None
            return modelopt.ModelOptEncoder(w3_scale_ratio, algo), modelopt.quantization_config(specs, algo)
        experts = {"nvfp4-ct": "NVFP4", "mxfp4": "MXFP4", "fp8-block-ct": None}[format]
        algo = "FP8_BLOCK" if fp8 else None
        return (
            compressed.CompressedTensorsEncoder(experts, algo, w3_scale_ratio),
            compressed.quantization_config(specs, experts, algo),
        )
    except (ImportError, ValueError) as error:
        raise CheckpointError(str(error)) from error


# --- writing --------------------------------------------------------------------------


@dataclass
class Summary:
    """What `make_tiny` wrote.

    Attributes:
        parameters: Elements of the unquantised tensors.
        bytes: Tensor bytes on disk.
        families: Per family of `TensorSpec.kind`: parameters, stored tensors, bytes.
    """

    path: str
    format: str
    architecture: str
    seed: int
    parameters: int = 0
    tensors: int = 0
    bytes: int = 0
    shards: int = 0
    families: dict[str, dict[str, int]] = field(default_factory=dict)

    def add(self, spec: TensorSpec, stored: Mapping[str, torch.Tensor]) -> None:
        row = self.families.setdefault(spec.kind.partition(".")[0], {"parameters": 0, "tensors": 0, "bytes": 0})
        size = sum(t.nbytes for t in stored.values())
        for key, amount in (
            ("parameters", math.prod(spec.shape)),
            ("tensors", len(stored)),
            ("bytes", size),
        ):
            row[key] += amount
            setattr(self, key, getattr(self, key) + amount)


@contextmanager
def _replacing(out: Path, force: bool) -> Iterator[Path]:
    """A folder beside `out` that takes its place on success and vanishes on failure."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        if not force:
            raise CheckpointError(f"{out}: exists already. Choose another folder, or pass --force to replace it.")
        if not (out / "config.json").is_file():
            raise CheckpointError(
                f"{out}: holds no config.json, so it is not a checkpoint and --force "
                "does not replace it. Choose another folder."
            )
    out = out.resolve()  # a link stays a link, what it names is replaced
    out.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    old = work.with_name(work.name + ".old")
    try:
        yield work
        work.chmod(0o777 & ~_umask())
        if out.exists():
            out.rename(old)
        work.rename(out)
    except BaseException:
        if old.exists() and not out.exists():
            old.rename(out)
        shutil.rmtree(work, ignore_errors=True)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _split(specs: Mapping[str, TensorSpec], max_bytes: int) -> list[list[str]]:
    """Consecutive runs of names, at least two, of about equal unquantised size."""
    sizes = {name: math.prod(spec.shape) * DTYPE_BYTES[spec.dtype] for name, spec in specs.items()}
    total = sum(sizes.values())
    count = max(2, math.ceil(total / max_bytes))
    shards: list[list[str]] = [[] for _ in range(count)]
    seen = 0
    for name, size in sizes.items():
        shards[min(count - 1, seen * count // total)].append(name)
        seen += size
    return [shard for shard in shards if shard]


def make_tiny(
    out: str | os.PathLike,
    *,
    format: str = "bf16",
    arch: str = "text",
    attention: str | None = None,
    shape: TinyShape | None = None,
    seed: int = 0,
    force: bool = False,
    w3_scale_ratio: float = 1.0,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    weights: Mapping[str, torch.Tensor] | None = None,
    progress: bool = False,
) -> Summary:
    """Write a tiny checkpoint that vLLM can serve.

    Args:
        out: Folder to create. It appears complete or not at all.
        format: One of `FORMATS`.
        arch: ``"text"`` or ``"multimodal"``.
        attention: ``"fp8"`` (128x128 blocks, in the format's own dialect) or ``"bf16"``;
            None takes the published layout of the format.
        shape: Sizes; the default has KDA+dense, KDA+MoE, MLA+MoE and KDA+MoE layers.
        seed: Equal seeds and shapes give equal bytes.
        force: Replace `out` if it is a checkpoint.
        w3_scale_ratio: See `modelopt.ModelOptEncoder`; NVFP4 only.
        max_shard_bytes: Upper bound of a shard's unquantised size; there are always at
            least two shards.
        weights: Unquantised language model to write in place of random values, by name
            without the multimodal prefix; shapes and dtypes are those of `shape`, with
            ``A_log`` as long as stored.
        progress: Show a progress bar on standard error.

    Raises:
        CheckpointError: Impossible sizes, an `out` that must not be replaced,
            nvidia-modelopt missing for a quantised format, or `weights` of another
            shape.
    """
    shape = shape or TinyShape()
    shape.check()
    if format == "mxfp4":
        for name in ("latent", "expert_width"):
            if getattr(shape, name) % 32:
                raise CheckpointError(f"--{_flag(name)} is {getattr(shape, name)}; MXFP4 needs a multiple of 32.")
    if arch not in ARCHITECTURES:
        raise CheckpointError(f"arch {arch!r} is unknown; use one of {tuple(ARCHITECTURES)}.")
    config = model_config(shape, arch)
    specs = checkpoint_tensors(config)
    encode, quantisation = _encoding(format, attention, specs, w3_scale_ratio)

    out = Path(out)
    summary = Summary(str(out), format, ARCHITECTURES[arch], seed)

    def source(name: str) -> torch.Tensor:
        plain = name.removeprefix("language_model.")
        if weights is not None and not specs[name].kind.startswith("vision"):
            return _given_tensor(plain, specs[name], weights)
        return source_tensor(plain, specs[name], seed)

    with _replacing(out, force) as work:
        shards = _split(specs, max_shard_bytes)
        summary.shards = len(shards)
        weight_map: dict[str, str] = {}
        bar = _bar(len(specs), progress)
        for number, names in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            tensors: dict[str, torch.Tensor] = {}
            for name in names:
                stored = encode(name, specs[name], source)
                summary.add(specs[name], stored)
                tensors.update(stored)
                bar.update()
            save_file(tensors, work / file, metadata={"format": "pt"})
            (work / file).chmod(0o666 & ~_umask())  # save_file makes it private
            weight_map.update(dict.fromkeys(tensors, file))
        bar.close()
        _write_json(
            work / "model.safetensors.index.json",
            {
                "metadata": {"total_size": summary.bytes},
                "weight_map": dict(sorted(weight_map.items())),
            },
        )
        if quantisation is not None:
            # The native file has it in the text config, the others at the top.
            holder = config["text_config"] if format == "mxfp4" and arch == "multimodal" else config
            holder["quantization_config"] = quantisation
        if format == "nvfp4-modelopt":
            assert quantisation is not None
            _write_json(
                work / "hf_quant_config.json",
                {
                    "producer": {"name": "modelopt"},
                    "quantization": {k: v for k, v in quantisation.items() if k != "quant_method"},
                },
            )
        _write_json(work / "config.json", config)
        end = tiny_tokenizer.token_id("<|end_of_msg|>", shape.vocab)
        _write_json(
            work / "generation_config.json",
            {
                "bos_token_id": config["bos_token_id"],
                "eos_token_id": [config["eos_token_id"], end],
                "pad_token_id": config["pad_token_id"],
            },
        )
        tiny_tokenizer.write_tokenizer(work, shape.vocab)
        if arch == "multimodal":
            tiny_vision.write_files(work)
    return summary


def _bar(total: int, enabled: bool):
    from tqdm import tqdm

    # disable=None hides the bar when standard error is no terminal.
    return tqdm(total=total, unit=" tensors", leave=False, disable=None if enabled else True)
