# SPDX-License-Identifier: Apache-2.0
"""Collectives of unequal lengths between two real processes."""

import pytest
import torch
import torch.multiprocessing as mp

from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="CPU communicator")

SIZES = [3, 1]


def rows(rank: int) -> torch.Tensor:
    return torch.arange(SIZES[rank] * 2, dtype=torch.float32).view(-1, 2) + 10 * rank


def worker(rank: int, store: str) -> None:
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    group = torch.distributed.group.WORLD
    communicator = CpuCommunicator(group, torch.device("cpu"), group, "ep")
    want = torch.cat((rows(0), rows(1)))

    ids = torch.full((SIZES[rank],), rank, dtype=torch.int32)
    gathered, ids = communicator.all_gatherv([rows(rank), ids], 0, SIZES)
    assert torch.equal(gathered, want)
    assert ids.dtype == torch.int32 and ids.tolist() == [0, 0, 0, 1]
    assert torch.equal(communicator.all_gatherv(rows(1)), torch.cat((rows(1), rows(1))))
    empty = communicator.all_gatherv(rows(0)[: 3 * rank], 0, [0, 3])
    assert torch.equal(empty, rows(0))

    given = want * (rank + 1)
    mine = communicator.reduce_scatterv(given, 0, SIZES)
    assert torch.equal(mine, rows(rank) * 3)
    assert torch.equal(given, want * (rank + 1))  # left as it was
    assert torch.equal(communicator.reduce_scatterv(given, 0), 3 * want[2 * rank : 2 * rank + 2])
    torch.distributed.destroy_process_group()


def test_ranks_with_different_numbers_of_rows(tmp_path):
    mp.spawn(worker, (str(tmp_path / "store"),), nprocs=2)
