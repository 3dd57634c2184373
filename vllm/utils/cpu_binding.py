# SPDX-License-Identifier: Apache-2.0
"""Share the cores of a few NUMA nodes among more workers than nodes."""

from collections.abc import Callable

from vllm.utils.cpu_resource_utils import LogicalCPUInfo

CPUs = list[LogicalCPUInfo]


def share_cpus(
    cpus: CPUs,
    workers: int,
    mine: range,
    per_core: Callable[[CPUs], CPUs],
    reserve: int,
) -> tuple[list[CPUs], CPUs]:
    """Cut the cores into equal runs, one for each worker on this machine.

    Args:
        cpus: logical CPUs that may be used.
        workers: workers on this machine, over all data-parallel engines.
        mine: which of them the caller starts.
        per_core: picks the logical CPUs to use of one core's, sorted by id.
        reserve: CPUs to keep free for other processes; fewer are kept when a
            worker would be left without any.

    Returns:
        One list of CPUs for each of ``mine``, and the CPUs kept free.

    Raises:
        ValueError: there are fewer logical CPUs than workers.
    """
    cores: dict[tuple[int, int], CPUs] = {}
    for cpu in sorted(cpus, key=lambda c: (c.numa_node, c.physical_core, c.id)):
        cores.setdefault((cpu.numa_node, cpu.physical_core), []).append(cpu)
    usable = [cpu for core in cores.values() for cpu in per_core(core)]
    if len(usable) < workers:  # rather hardware threads than none
        usable = [cpu for core in cores.values() for cpu in core]
    if len(usable) < workers:
        raise ValueError(
            f"{workers} CPU workers need a CPU each, but only {len(usable)} may be "
            f"used: {[cpu.id for cpu in usable]}. Lower the tensor, pipeline or "
            "data parallel size, or widen the CPU affinity of this process."
        )
    # Rounded so that the runs differ by one CPU at most.
    bounds = [len(usable) * i // workers for i in range(workers + 1)]
    runs = [usable[bounds[i] : bounds[i + 1]] for i in mine]
    kept: CPUs = []
    for run in reversed(runs):
        while len(kept) < reserve and len(run) > 1:
            kept.append(run.pop())
    return runs, kept
