# SPDX-License-Identifier: Apache-2.0
"""Finding what a tensor of an expert is loaded into."""

import re
from collections.abc import Callable, Sequence

__all__ = ["entries_by_expert"]

Entry = tuple[str, str, int, str]


def entries_by_expert(mapping: Sequence[Entry]) -> Callable[[str], list[Entry]]:
    """Index a mapping of expert parameters by the expert's number in the file.

    A loader compares the name of each tensor with one entry after the other. Kimi K3 has
    92 layers with 896 experts, so that would be a million names and 2688 entries.

    Args:
        mapping: Part of the parameter's name, part of the file's, expert, shard; an
            entry is for the names that contain its part, and earlier ones come first.

    Returns:
        For a name, the entries that can be for it, in their order: all that contain one
        of its numbers, and those without a number.
    """
    numbered: dict[str, list[tuple[int, Entry]]] = {}
    others: list[tuple[int, Entry]] = []
    for position, entry in enumerate(mapping):
        number = re.search(r"\.(\d+)\.", entry[1])
        of_number = numbered.setdefault(number[1], []) if number else others
        of_number.append((position, entry))

    def candidates(name: str) -> list[Entry]:
        found = others.copy()
        for part in set(name.split(".")):
            found += numbered.get(part, ())
        return [entry for _, entry in sorted(found)]

    return candidates
