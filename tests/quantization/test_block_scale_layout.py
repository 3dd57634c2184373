# SPDX-License-Identifier: Apache-2.0
"""Placement of block scales, row by row against the definition."""

import pytest

from vllm.model_executor.layers.quantization.utils.block_scale_layout import (
    Partition,
    place_parameter,
    place_span,
)

BLOCK = 128
TP_SIZES = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32]


def check(partitions, rank, size):
    """Every row keeps its source's scale, and no block holds rows of two."""
    placed = place_parameter(partitions, rank, size, BLOCK)
    taken = {}  # destination block -> (partition, source block)
    end = 0
    for index, (partition, p) in enumerate(zip(partitions, placed)):
        rows = partition.source_rows // (1 if partition.replicated else size)
        start = 0 if partition.replicated else rank * rows
        assert p.rows == rows and p.offset == end and p.padded_rows % BLOCK == 0
        assert p.lead + rows <= p.padded_rows < rows + 2 * BLOCK
        scale_row = {c.destination_scale_row: c.source_scale_row for c in p.copies}
        for i in range(rows):
            source, destination = start + i, p.offset + p.lead + i
            assert scale_row[destination // BLOCK] == source // BLOCK
            holds = taken.setdefault(destination // BLOCK, (index, source // BLOCK))
            assert holds == (index, source // BLOCK)
        assert sum(c.rows for c in p.copies) == rows
        assert [c.first for c in p.copies] == [max(start, c.source_scale_row * BLOCK) for c in p.copies]
        end += p.padded_rows
    return end


@pytest.mark.parametrize("heads", [8, 16, 64, 96, 192])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("size", TP_SIZES)
def test_kda_projection_of_any_size(heads, head_dim, size):
    """q, k, v, g split by heads, f_a replicated, b one row per head."""
    if heads % size:
        return
    wide = Partition(heads * head_dim)
    parts = [wide] * 4 + [Partition(head_dim, replicated=True), Partition(heads)]
    for rank in {0, 1 % size, size // 2, size - 1}:
        check(parts, rank, size)


@pytest.mark.parametrize(
    "size,rows", [(1, 49376), (2, 24752), (4, 12440), (8, 6284), (16, 3206), (32, 1667)]
)
def test_rows_of_the_real_model(size, rows):
    parts = [Partition(12288)] * 4 + [Partition(128, True), Partition(96)]
    placed = place_parameter(parts, size - 1, size, BLOCK)
    assert sum(p.rows for p in placed) == rows
    check(parts, size - 1, size)


@pytest.mark.parametrize(
    "rows",
    [[192, 192], [64, 64, 64, 64], [320, 320], [1536, 576], [576, 12288], [256, 192]],
)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_partial_partitions_inside(rows, size):
    for rank in range(size):
        check([Partition(r) for r in rows], rank, size)


def test_most_ranks_start_inside_a_block_at_576_rows_each():
    """q_b at TP32: 18432 rows in 144 blocks, 4.5 blocks per rank."""
    ends = {check([Partition(18432)], rank, 32) for rank in range(32)}
    assert ends == {640}


def test_scale_rows_shared_by_ranks():
    """12 scale rows at TP8; b with two scale rows, H = 192, TP2 straddles."""
    for rank in range(8):
        check([Partition(12 * BLOCK)], rank, 8)
    (b,) = place_parameter([Partition(192)], 1, 2, BLOCK)
    assert b.lead == 96 and [c.source_scale_row for c in b.copies] == [0, 1]


def test_a_span_inside_one_block_needs_no_lead():
    p = place_span(48, 48, BLOCK)
    assert (p.lead, p.padded_rows, len(p.copies)) == (0, 128, 1)


def test_rows_that_ranks_cannot_share_are_refused():
    with pytest.raises(ValueError, match=r"partition 1 has 96 rows.*5 ranks.*\[1, 2, 3, 4, 6"):
        place_parameter([Partition(640), Partition(96)], 0, 5, BLOCK)
    with pytest.raises(ValueError, match="cannot place rows"):
        place_span(0, 5, BLOCK, offset=64)
