# SPDX-License-Identifier: Apache-2.0
"""Matching vLLM's module names against the names in a ModelOpt config.

The same module is called differently by checkpoint and model: under another root
(``language_model.model.``, ``model.``, none), with ``mlp`` for
``block_sparse_moe``, and fused (``gate_up_proj`` for ``gate_proj`` and
``up_proj``). Every comparison here is between canonical names, which have no root
and spell the MoE block ``mlp``, so that the decision does not depend on the
spelling.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from vllm.checkpoint import fused_modules as fused
from vllm.checkpoint.strictness import refuse

__all__ = [
    "canonical_name",
    "canonical_table",
    "check_algo",
    "find_algo",
    "is_excluded",
    "map_patterns",
    "shards_of",
    "spellings",
]

# Longest first.
_ROOTS = (
    "language_model.model.",
    "model.language_model.",
    "language_model.",
    "model.",
)

_SPELLINGS = ("mlp", "block_sparse_moe")

# Fused modules of Kimi K3, where a model class has no mapping of its own.
_FUSED = fused.packed_modules_mapping(fused.fused_modules())

# What MIXED_PRECISION can run, by kind of layer.
_ALGOS = {
    "linear layer": ("FP8", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8"),
    "lm_head": ("FP8", "NVFP4", "W4A16_NVFP4", "MXFP8"),
    "bank of experts": ("FP8", "NVFP4", "W4A16_NVFP4", "MXFP8"),
}

_EXPERT = re.compile(r"(.*\.experts)(?:\.\d+(?:\.\w+)?|\.routed_experts)")


def canonical_name(name: str) -> str:
    """Return the name without root, and with ``mlp`` for ``block_sparse_moe``.

    Idempotent: canonical names map to themselves.
    """
    for root in _ROOTS:
        if name.startswith(root):
            return canonical_name(name[len(root) :])
    parts = (_SPELLINGS[0] if p in _SPELLINGS else p for p in name.split("."))
    return ".".join(parts)


def spellings(canonical: str) -> list[str]:
    """Return every name that has this canonical name."""
    parts = canonical.split(".")
    inner = dict.fromkeys(
        ".".join(spelling if p == _SPELLINGS[0] else p for p in parts)
        for spelling in _SPELLINGS
    )
    return [root + name for root in (*_ROOTS, "") for name in inner]


def canonical_table(layers: Mapping[str, Mapping]) -> dict[str, str]:
    """Turn ``quantized_layers`` into canonical name → upper-case algorithm.

    Single experts (``…experts.3.w1``) stand for their bank (``…experts``).

    Raises:
        ValueError: An entry has no ``quant_algo``, or two spellings of one module
            disagree. If the user lets the latter through, the first one decides.
    """
    table: dict[str, str] = {}
    origin: dict[str, str] = {}
    for key, info in layers.items():
        algo = info.get("quant_algo")
        if not algo:
            raise ValueError(f"quantized_layers[{key!r}] has no quant_algo: {info}")
        name = canonical_name(key)
        if bank := _EXPERT.fullmatch(name):
            name = bank[1]
        algo = str(algo).upper()
        if table.setdefault(name, algo) != algo:
            refuse(
                f"quantized_layers gives {origin[name]!r} {table[name]} and {key!r} "
                f"{algo}, which are the same module"
            )
        origin.setdefault(name, key)
    return table


def check_algo(name: str, algo: str, kind: str | None = None) -> None:
    """Refuse an algorithm that a layer cannot run.

    Args:
        name: Module name, for the message.
        algo: Upper-case algorithm.
        kind: ``"linear layer"``, ``"lm_head"`` or ``"bank of experts"``; None asks
            whether any kind supports it.

    Raises:
        ValueError: It does not. If the user lets that through, upstream decides, which
            takes the layer for unquantised.
    """
    supported = _ALGOS[kind] if kind else sorted(set().union(*_ALGOS.values()))
    if algo not in supported:
        refuse(
            f"{name}: quant_algo {algo!r} is not supported for a {kind or 'layer'} of a "
            f"MIXED_PRECISION checkpoint; supported: {', '.join(supported)}"
        )


def shards_of(
    name: str, packed_modules_mapping: Mapping[str, Sequence[str]]
) -> list[str]:
    """Return the unfused names of a fused module, or an empty list.

    The model's own mapping goes before the built-in one.
    """
    parent, _, last = name.rpartition(".")
    shards = packed_modules_mapping.get(last) or _FUSED.get(last) or ()
    return [f"{parent}.{shard}" if parent else shard for shard in shards]


def find_algo(
    name: str,
    table: Mapping[str, str],
    packed_modules_mapping: Mapping[str, Sequence[str]],
) -> str | None:
    """Return a module's algorithm, or None if the table does not list it.

    Args:
        name: vLLM's module name, e.g. ``…self_attn.in_proj_qkvgfab``.
        table: From :func:`canonical_table`.
        packed_modules_mapping: Fused name → shard names, from the model.

    Raises:
        ValueError: Only some shards of a fused module are listed, or with
            different algorithms. If the user lets that through, the first one listed
            decides.
    """
    canonical = canonical_name(name)
    if bank := _EXPERT.fullmatch(canonical):
        canonical = bank[1]
    shards = shards_of(canonical, packed_modules_mapping)
    listed = {shard: table[shard] for shard in shards if shard in table}
    if listed:
        missing = [_last(shard) for shard in shards if shard not in table]
        if missing:
            refuse(
                f"{name}: quantized_layers lists {_lasts(listed)} but not {missing}, "
                "and vLLM runs them as one layer. List all of them, or none."
            )
        first = next(iter(listed.values()))
        algos = set(listed.values()) | {table.get(canonical, first)}
        if len(algos) > 1:
            refuse(
                f"{name}: its shards are listed with different algorithms: "
                f"{ {_last(k): v for k, v in listed.items()} }, and vLLM runs them as "
                "one layer. Quantise them alike."
            )
        return first
    return table.get(canonical)


def map_patterns(
    patterns: Iterable[str], rename: Callable[[str], str | None]
) -> list[str]:
    """Add to exclusion patterns what they become when the model renames modules.

    Args:
        patterns: ``exclude_modules``.
        rename: Maps a weight name; None drops it.

    Returns:
        The patterns, each followed by its renamed form where that differs.
    """
    mapped: dict[str, None] = {}
    for pattern in patterns:
        mapped[pattern] = None
        core = pattern.strip("*")
        if pattern.startswith("re:") or not core:
            continue
        head, _, tail = pattern.partition(core)
        # Rules like ".mlp.fc1." → ".fc1." need the dot that follows a module's name.
        for name in (rename(core), (rename(core + ".") or "").removesuffix(".")):
            if name:
                mapped[head + name + tail] = None
    return list(mapped)


def is_excluded(
    name: str,
    patterns: Iterable[str],
    packed_modules_mapping: Mapping[str, Sequence[str]],
) -> bool:
    """Whether a module is excluded from quantisation.

    A pattern is a glob over the whole name (``*.self_attn.g_proj``, ``lm_head``,
    ``*mlp.gate*``), a prefix of it up to a dot, or, after ``re:``, a regular
    expression from its start.

    Args:
        name: vLLM's module name.
        patterns: ``exclude_modules``.
        packed_modules_mapping: Fused name → shard names, from the model.

    Raises:
        ValueError: Only some shards of a fused module are excluded. If the user lets
            that through, the first shard decides.
    """
    patterns = tuple(patterns)
    if _matches(canonical_name(name), patterns):
        return True
    shards = shards_of(canonical_name(name), packed_modules_mapping)
    hit = [shard for shard in shards if _matches(shard, patterns)]
    if hit and len(hit) < len(shards):
        rest = _lasts(shard for shard in shards if shard not in hit)
        refuse(
            f"{name}: exclude_modules excludes {_lasts(hit)} but not {rest}, and vLLM "
            "runs them as one layer. Exclude all of them, or none."
        )
    return bool(hit) and hit[0] == shards[0]


@lru_cache(maxsize=65536)
def _matches(canonical: str, patterns: tuple[str, ...]) -> bool:
    names = spellings(canonical)
    for pattern in patterns:
        if pattern.startswith("re:"):
            regex = re.compile(pattern[3:])
            if any(regex.match(name) for name in names):
                return True
        elif any(
            fnmatchcase(name, pattern) or fnmatchcase(name, pattern + ".*")
            for name in names
        ):
            return True
    return False


def _last(name: str) -> str:
    return name.rpartition(".")[2]


def _lasts(names: Iterable[str]) -> list[str]:
    return [_last(name) for name in names]
