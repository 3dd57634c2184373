# SPDX-License-Identifier: Apache-2.0
"""Where block scales go when a block-scaled weight is sharded or fused.

A source tensor has one scale per ``block`` consecutive rows: row ``r`` uses scale
row ``r // block``. A kernel reads row ``d`` of the parameter it is given with scale
row ``d // block`` of that parameter. A rank's parameter is a list of partitions,
each a span of rows of some source tensor. The functions here place the spans so
that no block of the parameter mixes rows of two source blocks:

- each partition starts on a block boundary and is padded to one at its end;
- a span that starts inside a source block and runs beyond it is padded in front
  as well, so that both sides have the same phase;
- a span inside one source block needs no phase.

So every span can be placed exactly. Padding rows are zero and are dropped before
anyone sees them. The same functions serve columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Partition", "Placement", "ScaleCopy", "place_parameter", "place_span"]


@dataclass(frozen=True)
class Partition:
    """One shard of a fused parameter: a source tensor and how ranks share it."""

    source_rows: int
    replicated: bool = False


@dataclass(frozen=True)
class ScaleCopy:
    """One block of a parameter: its scale row and the rows that use it.

    ``first`` and ``rows`` give the span in rows of the *source* tensor.
    """

    source_scale_row: int
    destination_scale_row: int
    first: int
    rows: int


@dataclass(frozen=True)
class Placement:
    """A span of source rows inside a parameter.

    Attributes:
        offset: First row of the parameter that belongs to this placement; a
            multiple of the block.
        lead: Padding rows in front.
        rows: Rows of the span.
        padded_rows: ``lead + rows`` rounded up to a multiple of the block.
        copies: The blocks, in order.
    """

    offset: int
    lead: int
    rows: int
    padded_rows: int
    copies: tuple[ScaleCopy, ...]


def place_span(start: int, rows: int, block: int, offset: int = 0) -> Placement:
    """Place rows ``[start, start + rows)`` of a source tensor at row ``offset``.

    Args:
        start: First source row.
        rows: Number of rows, > 0.
        block: Rows per scale.
        offset: Destination row, a multiple of ``block``.

    Raises:
        ValueError: ``offset`` is no multiple of ``block``, or the span is empty.
    """
    if offset % block or rows <= 0 or start < 0:
        raise ValueError(
            f"cannot place rows [{start}, {start + rows}) at row {offset} with "
            f"blocks of {block}"
        )
    first_block, last_block = start // block, (start + rows - 1) // block
    lead = start % block if first_block < last_block else 0
    copies = []
    for source in range(first_block, last_block + 1):
        first = max(start, source * block)
        end = min(start + rows, (source + 1) * block)
        destination = offset // block + source - first_block
        copies.append(ScaleCopy(source, destination, first, end - first))
    return Placement(offset, lead, rows, len(copies) * block, tuple(copies))


def place_parameter(
    partitions: Sequence[Partition], tp_rank: int, tp_size: int, block: int
) -> list[Placement]:
    """Place every partition of one rank's parameter.

    Args:
        partitions: Shards in the parameter's order.
        tp_rank: Rank, ``0 <= tp_rank < tp_size``.
        tp_size: Ranks that split the rows of partitions that are not replicated.
        block: Rows per scale.

    Raises:
        ValueError: A partition's rows do not divide by ``tp_size``; the message
            lists sizes that work.
    """
    placed: list[Placement] = []
    offset = 0
    for index, partition in enumerate(partitions):
        start, rows = 0, partition.source_rows
        if not partition.replicated:
            if rows % tp_size:
                work = [n for n in range(1, min(rows, 64) + 1) if rows % n == 0]
                raise ValueError(
                    f"partition {index} has {rows} rows, which {tp_size} ranks cannot "
                    f"share evenly; tensor-parallel sizes that work: {work}"
                )
            rows //= tp_size
            start = tp_rank * rows
        placed.append(place_span(start, rows, block, offset))
        offset += placed[-1].padded_rows
    return placed
