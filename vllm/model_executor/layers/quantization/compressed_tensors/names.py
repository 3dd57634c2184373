# SPDX-License-Identifier: Apache-2.0
"""Which scheme of a compressed-tensors config belongs to which of vLLM's modules.

The config speaks of a checkpoint's modules: linears before fusing, experts one by
one, under the checkpoint's root. So a fused module is looked up shard by shard, and
every name under all its spellings (see ``utils/modelopt_names.py``).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

from vllm.checkpoint.strictness import refuse
from vllm.model_executor.layers.quantization.utils.modelopt_names import (
    canonical_name,
    shards_of,
    spellings,
)

__all__ = ["expert_linears", "find_target", "matches"]


def find_target(
    name: str,
    class_name: str,
    schemes: Mapping[str, Any],
    ignore: Iterable[str],
    packed_modules_mapping: Mapping[str, Sequence[str]],
) -> str | None:
    """Return the target that quantises a module, or None if nothing does.

    A target or ignored name is a module's whole name, a regular expression from its
    start (``re:``), or, for targets, part of a class's name, which a target by name
    goes before.

    Args:
        name: vLLM's module name.
        class_name: Its class.
        schemes: Target to scheme.
        ignore: What is not quantised whatever the targets say.
        packed_modules_mapping: Fused name to shard names, from the model.

    Raises:
        ValueError: The shards of a fused module have different schemes. If the user
            lets that through, the first shard decides.
    """
    ignore, targets = tuple(ignore), tuple(schemes)
    by_class = next((t for t in targets if _is_class(t, class_name)), None)

    def of(module: str) -> str | None:
        if matches(module, ignore):
            return None
        return next((t for t in targets if matches(module, (t,))), by_class)

    shards = shards_of(name, packed_modules_mapping)
    if not shards or any(n in ignore or n in schemes for n in spellings(canonical_name(name))):
        return of(name)
    found = {shard.rpartition(".")[2]: of(shard) for shard in shards}
    first, *rest = (schemes.get(target or "") for target in found.values())
    if any(scheme != first for scheme in rest):
        refuse(
            f"{name}: vLLM runs {list(found)} as one layer, but the quantisation config "
            f"gives them different schemes: {_describe(found)}. Quantise them alike, or "
            "ignore all of them."
        )
    return next(iter(found.values()))


def _describe(found: Mapping[str, str | None]) -> str:
    return ", ".join(
        f"{shard} is not quantised" if target is None else f"{shard} follows {target!r}"
        for shard, target in found.items()
    )


def _is_class(target: str, class_name: str) -> bool:
    if target.startswith("re:"):
        return re.match(target[3:], class_name) is not None
    return target.lower() in class_name.lower()


def matches(name: str, patterns: tuple[str, ...]) -> bool:
    """Whether any pattern names the module, under any root."""
    exact, regexes = _compile(patterns)
    names = spellings(canonical_name(name))
    return not exact.isdisjoint(names) or any(r.match(n) for r in regexes for n in names)


@lru_cache(maxsize=64)
def _compile(patterns: tuple[str, ...]) -> tuple[frozenset[str], list[re.Pattern]]:
    regexes = [re.compile(p[3:]) for p in patterns if p.startswith("re:")]
    return frozenset(p for p in patterns if not p.startswith("re:")), regexes


def expert_linears(bank: str, names: tuple[str, str, str]) -> list[str]:
    """Return the checkpoint's names of expert 0's gate, up and down linear.

    A module called ``block_sparse_moe`` names them as Mixtral did, ``w1``, ``w3`` and
    ``w2``; asking for ``gate_proj`` there would take the decision of a pattern that
    is meant for dense layers and shared experts.

    Args:
        bank: vLLM's name of the experts, ``….experts`` or a module in it.
        names: What the layer believes them to be called.
    """
    bank = bank[: bank.rindex("experts") + len("experts")] if "experts" in bank else bank
    bank = bank.removesuffix(".routed_experts")
    if "block_sparse_moe" in bank.split("."):
        names = ("w1", "w3", "w2")
    return [f"{bank}.0.{name}" for name in names]
