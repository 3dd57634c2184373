# SPDX-License-Identifier: Apache-2.0
import pytest

from vllm.utils.cpu_binding import share_cpus
from vllm.utils.cpu_resource_utils import LogicalCPUInfo


def machine(cores: int, threads: int = 1, nodes: int = 1):
    """CPUs numbered as Linux does: first threads of all cores, then second."""
    return [
        LogicalCPUInfo(id=t * cores + c, physical_core=c, numa_node=c * nodes // cores)
        for t in range(threads)
        for c in range(cores)
    ]


def last(core):
    return core[-1:]


def ids(runs):
    return [[cpu.id for cpu in run] for run in runs]


def test_two_workers_on_one_node_of_two_cores():
    runs, kept = share_cpus(machine(2), 2, range(2), last, reserve=1)
    assert ids(runs) == [[0], [1]]
    assert kept == []  # a reserve may not leave a worker without a CPU


def test_reserve_is_taken_from_the_last_worker():
    runs, kept = share_cpus(machine(4), 2, range(2), last, reserve=1)
    assert ids(runs) == [[0, 1], [2]] and [c.id for c in kept] == [3]


def test_one_thread_of_each_core_unless_there_are_too_few_cores():
    runs, _ = share_cpus(machine(2, threads=2), 2, range(2), last, reserve=0)
    assert ids(runs) == [[2], [3]]
    runs, _ = share_cpus(machine(2, threads=2), 4, range(4), last, reserve=0)
    assert ids(runs) == [[0], [2], [1], [3]]


def test_data_parallel_engines_take_disjoint_runs():
    cpus = machine(8, nodes=2)
    runs = [
        ids(share_cpus(cpus, 4, range(2 * dp, 2 * dp + 2), last, 0)[0]) for dp in (0, 1)
    ]
    assert runs == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]


def test_uneven_cores_leave_no_worker_without():
    runs, _ = share_cpus(machine(7), 3, range(3), last, reserve=0)
    assert ids(runs) == [[0, 1], [2, 3], [4, 5, 6]]


def test_more_workers_than_cpus_is_refused():
    with pytest.raises(ValueError, match=r"4 CPU workers .* only 2 .*\[0, 1\]"):
        share_cpus(machine(2), 4, range(4), last, reserve=0)
