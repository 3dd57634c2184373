# SPDX-License-Identifier: Apache-2.0
"""Which tensors an unquantised Kimi K3 checkpoint holds, from its config alone.

The mapping is a pure function of plain dictionaries (``config.json`` as parsed)
and needs neither torch nor the rest of vLLM, so that it can drive header checks
before any weight is read, and the writer of tiny checkpoints.

Shapes are ``(out, in)`` for linears. Dtypes use the spelling of safetensors.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = [
    "TensorSpec",
    "checkpoint_tensors",
    "is_kda_layer",
    "is_moe_layer",
    "text_tensors",
    "vision_tensors",
]

MULTIMODAL_ARCH = "KimiK3ForConditionalGeneration"
TEXT_ARCH = "KimiLinearForCausalLM"
TEXT_PREFIX = "language_model."

Config = Mapping[str, Any]


@dataclass(frozen=True)
class TensorSpec:
    """What one tensor of an unquantised checkpoint looks like.

    Attributes:
        shape: Shape on disk, ``(out, in)`` for linears.
        dtype: ``"BF16"`` or ``"F32"``.
        kind: Role, independent of layer and expert number: the family
            (``kda``, ``mla``, ``dense``, ``moe``, ``shared``, ``expert``,
            ``norm``, ``attn_res``, ``embedding``, ``lm_head``, ``vision``),
            then the module, as in ``kda.b_proj`` or ``expert.w2``.
        zero_tail_axis: Axis on which a file may hold more than ``shape`` says, the
            surplus being zero. Only ``A_log`` has one: the published checkpoint
            stores 128 values for 96 heads.
    """

    shape: tuple[int, ...]
    dtype: str
    kind: str
    zero_tail_axis: int | None = None


def _get(config: Config, key: str) -> Any:
    value = config.get(key)
    if value is None:
        raise ValueError(
            f"config: '{key}' is missing; a Kimi K3 text config must set it. Take "
            "config.json from the checkpoint that the weights belong to."
        )
    return value


def _linear_attn(config: Config) -> Config:
    linear = _get(config, "linear_attn_config")
    for key in (
        "kda_layers",
        "full_attn_layers",
        "num_heads",
        "head_dim",
        "short_conv_kernel_size",
    ):
        if linear.get(key) is None:
            raise ValueError(f"config: 'linear_attn_config.{key}' is missing.")
    return linear


def is_kda_layer(config: Config, index: int) -> bool:
    """Whether 0-based layer `index` is KDA; the config's lists count from 1.

    Raises:
        ValueError: The layer is in both lists or in neither.
    """
    linear = _linear_attn(config)
    kda = index + 1 in linear["kda_layers"]
    if kda == (index + 1 in linear["full_attn_layers"]):
        raise ValueError(
            f"config: layer {index + 1} (counted from 1) must stand in exactly one of "
            "linear_attn_config.kda_layers and linear_attn_config.full_attn_layers."
        )
    return kda


def is_moe_layer(config: Config, index: int) -> bool:
    """Whether 0-based layer `index` has routed experts instead of a dense MLP."""
    return (
        config.get("num_experts") is not None
        and index >= config.get("first_k_dense_replace", 0)
        and index % config.get("moe_layer_freq", 1) == 0
    )


def _norm(size: int, kind: str = "norm") -> TensorSpec:
    return TensorSpec((size,), "BF16", kind)


def _linear(out: int, inp: int, kind: str) -> TensorSpec:
    return TensorSpec((out, inp), "BF16", kind)


def _kda(config: Config) -> Iterator[tuple[str, TensorSpec]]:
    linear = _linear_attn(config)
    hidden = _get(config, "hidden_size")
    heads, dim = linear["num_heads"], linear["head_dim"]
    width = heads * dim
    for name in ("q_proj", "k_proj", "v_proj"):
        yield f"{name}.weight", _linear(width, hidden, f"kda.{name}")
    if linear.get("use_full_rank_gate", False):
        yield "g_proj.weight", _linear(width, hidden, "kda.g_proj")
    else:
        yield "g_a_proj.weight", _linear(dim, hidden, "kda.g_a_proj")
        yield "g_b_proj.weight", _linear(width, dim, "kda.g_b_proj")
    yield "b_proj.weight", _linear(heads, hidden, "kda.b_proj")
    yield "f_a_proj.weight", _linear(dim, hidden, "kda.f_a_proj")
    yield "f_b_proj.weight", _linear(width, dim, "kda.f_b_proj")
    taps = linear["short_conv_kernel_size"]
    for name in ("q_conv1d", "k_conv1d", "v_conv1d"):
        yield f"{name}.weight", TensorSpec((width, 1, taps), "F32", "kda.conv1d")
    yield "A_log", TensorSpec((heads,), "F32", "kda.A_log", zero_tail_axis=0)
    yield "dt_bias", TensorSpec((width,), "F32", "kda.dt_bias")
    yield "o_norm.weight", TensorSpec((dim,), "F32", "kda.o_norm")
    yield "o_proj.weight", _linear(hidden, width, "kda.o_proj")


def _mla(config: Config) -> Iterator[tuple[str, TensorSpec]]:
    hidden = _get(config, "hidden_size")
    heads = _get(config, "num_attention_heads")
    kv_rank, rope = _get(config, "kv_lora_rank"), _get(config, "qk_rope_head_dim")
    nope, value = _get(config, "qk_nope_head_dim"), _get(config, "v_head_dim")
    q_rank = config.get("q_lora_rank")
    q_out = heads * (nope + rope)
    if q_rank is None:
        yield "q_proj.weight", _linear(q_out, hidden, "mla.q_proj")
    else:
        yield "q_a_proj.weight", _linear(q_rank, hidden, "mla.q_a_proj")
        yield "q_a_layernorm.weight", _norm(q_rank)
        yield "q_b_proj.weight", _linear(q_out, q_rank, "mla.q_b_proj")
    yield (
        "kv_a_proj_with_mqa.weight",
        _linear(kv_rank + rope, hidden, "mla.kv_a_proj_with_mqa"),
    )
    yield "kv_a_layernorm.weight", _norm(kv_rank)
    yield (
        "kv_b_proj.weight",
        _linear(heads * (nope + value), kv_rank, "mla.kv_b_proj"),
    )
    if config.get("mla_use_output_gate"):
        yield "g_proj.weight", _linear(heads * value, hidden, "mla.g_proj")
    yield "o_proj.weight", _linear(hidden, heads * value, "mla.o_proj")


def _mlp(hidden: int, width: int, family: str) -> Iterator[tuple[str, TensorSpec]]:
    for name in ("gate_proj", "up_proj"):
        yield f"{name}.weight", _linear(width, hidden, f"{family}.{name}")
    yield "down_proj.weight", _linear(hidden, width, f"{family}.down_proj")


def _moe(config: Config, most: int | None) -> Iterator[tuple[str, TensorSpec]]:
    hidden = _get(config, "hidden_size")
    experts, width = _get(config, "num_experts"), _get(config, "moe_intermediate_size")
    latent = config.get("routed_expert_hidden_size")
    yield "gate.weight", _linear(experts, hidden, "moe.gate")
    yield (
        "gate.e_score_correction_bias",
        TensorSpec((experts,), "F32", "moe.e_score_correction_bias"),
    )
    if latent is not None:
        yield (
            "routed_expert_down_proj.weight",
            _linear(latent, hidden, "moe.routed_expert_down_proj"),
        )
        if config.get("latent_moe_use_norm"):
            yield "routed_expert_norm.weight", _norm(latent)
        yield (
            "routed_expert_up_proj.weight",
            _linear(hidden, latent, "moe.routed_expert_up_proj"),
        )
    shared = config.get("num_shared_experts") or 0
    if shared:
        for name, spec in _mlp(hidden, width * shared, "shared"):
            yield f"shared_experts.{name}", spec
    expert_in = hidden if latent is None else latent
    for expert in range(experts if most is None else min(experts, most)):
        for name in ("w1", "w3"):
            yield (
                f"experts.{expert}.{name}.weight",
                _linear(width, expert_in, f"expert.{name}"),
            )
        yield (
            f"experts.{expert}.w2.weight",
            _linear(expert_in, width, "expert.w2"),
        )


def _layer(config: Config, index: int, experts: int | None) -> Iterator[tuple[str, TensorSpec]]:
    hidden = _get(config, "hidden_size")
    yield "input_layernorm.weight", _norm(hidden)
    yield "post_attention_layernorm.weight", _norm(hidden)
    if config.get("attn_res_block_size") is not None:
        for name in ("self_attention_res", "mlp_res"):
            yield f"{name}_norm.weight", _norm(hidden, "attn_res.norm")
            yield f"{name}_proj.weight", _linear(1, hidden, "attn_res.proj")
    attention = _kda if is_kda_layer(config, index) else _mla
    for name, spec in attention(config):
        yield f"self_attn.{name}", spec
    if is_moe_layer(config, index):
        for name, spec in _moe(config, experts):
            yield f"block_sparse_moe.{name}", spec
    else:
        for name, spec in _mlp(hidden, _get(config, "intermediate_size"), "dense"):
            yield f"mlp.{name}", spec


def text_tensors(text_config: Config, prefix: str = "", experts: int | None = None) -> dict[str, TensorSpec]:
    """Tensors of the language model, in model order.

    Args:
        text_config: The text config as a plain dict (the whole ``config.json`` of a
            ``KimiLinearForCausalLM`` checkpoint, ``text_config`` of a multimodal one).
        prefix: Put before every name; ``"language_model."`` in the multimodal class.
        experts: How many experts of each layer to list; None lists all. With 1, expert 0
            stands for its bank, and the full-size model has 4,000 names, not 250,000.

    Returns:
        Name to `TensorSpec`.

    Raises:
        ValueError: A key that decides a shape is missing, or the layer lists overlap.
    """
    hidden, vocab = _get(text_config, "hidden_size"), _get(text_config, "vocab_size")
    specs = {"model.embed_tokens.weight": TensorSpec((vocab, hidden), "BF16", "embedding")}
    for index in range(_get(text_config, "num_hidden_layers")):
        for name, spec in _layer(text_config, index, experts):
            specs[f"model.layers.{index}.{name}"] = spec
    if text_config.get("attn_res_block_size") is not None:
        specs["model.output_attn_res_norm.weight"] = _norm(hidden, "attn_res.norm")
        specs["model.output_attn_res_proj.weight"] = _linear(1, hidden, "attn_res.proj")
    specs["model.norm.weight"] = _norm(hidden)
    if not text_config.get("tie_word_embeddings", False):
        specs["lm_head.weight"] = TensorSpec((vocab, hidden), "BF16", "lm_head")
    return {prefix + name: spec for name, spec in specs.items()}


def vision_tensors(vision_config: Config, text_hidden: int) -> dict[str, TensorSpec]:
    """Tensors of the vision tower and projector, in the bias-free K3 layout.

    Args:
        vision_config: ``vision_config`` of a multimodal checkpoint.
        text_hidden: Hidden size of the language model, the projector's output.

    Raises:
        ValueError: A size is missing, or the config asks for biases, layer norms or
            another projector, which Kimi K3 does not have.
    """
    wanted = {
        "norm_type": "rmsnorm",
        "mm_projector_type": "patchmergerv2",
        "attn_bias": False,
        "linear_bias": False,
        "patch_embed_proj_bias": False,
    }
    for key, value in wanted.items():
        if vision_config.get(key, value) != value:
            raise ValueError(
                f"config: vision_config.{key} is {vision_config[key]!r}; Kimi K3's vision tower has {value!r}."
            )
    hidden = _get(vision_config, "vt_hidden_size")
    mlp = _get(vision_config, "vt_intermediate_size")
    qkv = _get(vision_config, "qkv_hidden_size")
    patch = _get(vision_config, "patch_size")
    grid = (
        _get(vision_config, "init_pos_emb_height"),
        _get(vision_config, "init_pos_emb_width"),
    )
    specs = {
        "patch_embed.proj.weight": TensorSpec((hidden, 3, patch, patch), "BF16", "vision.patch_embed"),
        "patch_embed.pos_emb.weight": TensorSpec((*grid, hidden), "BF16", "vision.pos_emb"),
    }
    for block in range(_get(vision_config, "vt_num_hidden_layers")):
        for name, spec in {
            "norm0": _norm(hidden, "vision.norm"),
            "norm1": _norm(hidden, "vision.norm"),
            "mlp.fc0": _linear(mlp, hidden, "vision.linear"),
            "mlp.fc1": _linear(hidden, mlp, "vision.linear"),
            "wqkv": _linear(3 * qkv, hidden, "vision.linear"),
            "wo": _linear(hidden, qkv, "vision.linear"),
        }.items():
            specs[f"encoder.blocks.{block}.{name}.weight"] = spec
    specs["encoder.final_layernorm.weight"] = _norm(hidden, "vision.norm")
    specs = {f"vision_tower.{name}": spec for name, spec in specs.items()}
    height, width = _get(vision_config, "merge_kernel_size")
    merged = hidden * height * width
    specs["mm_projector.proj.0.weight"] = _linear(merged, merged, "vision.linear")
    specs["mm_projector.proj.2.weight"] = _linear(text_hidden, merged, "vision.linear")
    specs["mm_projector.post_norm.weight"] = _norm(text_hidden, "vision.norm")
    return specs


def checkpoint_tensors(config: Config, experts: int | None = None) -> dict[str, TensorSpec]:
    """Every tensor of an unquantised checkpoint.

    Args:
        config: The whole ``config.json`` of either class.
        experts: As in `text_tensors`.

    Raises:
        ValueError: The architecture is neither of the two, or a key is missing.
    """
    architectures = config.get("architectures") or []
    if MULTIMODAL_ARCH in architectures:
        text = _get(config, "text_config")
        specs = text_tensors(text, TEXT_PREFIX, experts)
        specs.update(vision_tensors(_get(config, "vision_config"), text["hidden_size"]))
        return specs
    if TEXT_ARCH in architectures:
        return text_tensors(config, experts=experts)
    raise ValueError(f"config: architectures is {list(architectures)}; expected {TEXT_ARCH} or {MULTIMODAL_ARCH}.")
