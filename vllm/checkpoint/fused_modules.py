# SPDX-License-Identifier: Apache-2.0
"""Which linears of Kimi K3 vLLM runs as one, and in which order.

The only place that says so. Model classes take their packed-module mapping and
their stacked-parameter table from here, the quantisation configs their name
lookup, the checkpoint tools their aliases.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

__all__ = [
    "FusedModule",
    "fused_modules",
    "fused_modules_in",
    "fused_modules_of",
    "packed_modules_mapping",
    "stacked_params",
    "use_fused_modules",
]


@dataclass(frozen=True)
class FusedModule:
    """One fused module.

    Attributes:
        name: vLLM's name of the module.
        shards: Names in the checkpoint, in the order of the parameter's rows.
        replicated: Shards that every tensor-parallel rank holds whole.
    """

    name: str
    shards: tuple[str, ...]
    replicated: frozenset[str] = frozenset()


def fused_modules(full_rank_gate: bool = True, low_rank_query: bool = True) -> tuple[FusedModule, ...]:
    """Fused modules of a model.

    Args:
        full_rank_gate: KDA's output gate is one ``g_proj`` (Kimi K3), not a
            product of two (Kimi Linear), and takes part in the input projection.
        low_rank_query: MLA has ``q_a_proj`` and ``q_b_proj``.
    """
    kda: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    kda += ("g_proj", "f_a_proj", "b_proj") if full_rank_gate else ("b_proj", "f_a_proj")
    modules = [
        FusedModule("in_proj_qkvgfab", kda, frozenset({"f_a_proj"})),
        FusedModule("conv1d", ("q_conv1d", "k_conv1d", "v_conv1d")),
        FusedModule("gate_up_proj", ("gate_proj", "up_proj")),
    ]
    if low_rank_query:
        shards = ("q_a_proj", "kv_a_proj_with_mqa")
        modules.append(FusedModule("fused_qkv_a_proj", shards, frozenset(shards)))
    return tuple(modules)


def fused_modules_of(config: Any) -> tuple[FusedModule, ...]:
    """Fused modules of the model that a text config (an object) describes."""
    kda = config.linear_attn_config or {}
    return fused_modules(
        full_rank_gate=bool(kda.get("use_full_rank_gate", False)),
        low_rank_query=getattr(config, "q_lora_rank", None) is not None,
    )


def fused_modules_in(modules: Iterable[str]) -> dict[str, FusedModule]:
    """Fused modules whose shards are all among the given module names, by full name."""
    children: dict[str, set[str]] = {}
    for module in modules:
        parent, _, last = module.rpartition(".")
        children.setdefault(parent, set()).add(last)
    return {
        f"{parent}.{fused.name}": fused
        for parent, names in children.items()
        for fused in fused_modules(full_rank_gate="g_proj" in names, low_rank_query="q_a_proj" in names)
        if names.issuperset(fused.shards)
    }


def packed_modules_mapping(modules: Iterable[FusedModule]) -> dict[str, list[str]]:
    """Fused name to shard names, as vLLM's quantisation configs want it."""
    return {module.name: list(module.shards) for module in modules}


def stacked_params(modules: Iterable[FusedModule]) -> list[tuple[str, str, int]]:
    """``(fused name, shard name, shard id)`` with leading dots, for ``load_weights``."""
    return [(f".{m.name}", f".{shard}", index) for m in modules for index, shard in enumerate(m.shards)]


def use_fused_modules(model: Any, config: Any, quant_config: Any | None) -> None:
    """Tell a model's quantisation config which of its linears run as one.

    Called before the linears are built: which modules there are depends on the
    config, so that a class attribute cannot say it.

    Args:
        model: Gets ``packed_modules_mapping``.
        config: Text config, an object.
        quant_config: vLLM's quantisation config, or None.
    """
    model.packed_modules_mapping = packed_modules_mapping(fused_modules_of(config))
    if quant_config is not None:
        quant_config.packed_modules_mapping.update(model.packed_modules_mapping)
