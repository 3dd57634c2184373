from vllm.utils.cpu_binding import share_cpus


# fork: extend
class OMPProcessManager:
    # fork: edit b5d01fa9f1f3
    def __init__(self, config):
        # fork: after self.local_dp_rank
        self.local_dp_size = config.parallel_config.data_parallel_size_local

    # fork: edit ccdbae09eb7c
    def _get_autobind_cpu_ids(self, cpu_selector, allowed_numa_nodes, logical_cpu_list):
        # fork: after logical_cpu_list
        workers = self.local_world_size * self.local_dp_size
        if len(allowed_numa_nodes) < workers and not self.simulate_multi_node:
            first = self.local_world_size * (self.local_dp_rank or 0)
            return share_cpus(
                logical_cpu_list,
                workers,
                range(first, first + self.local_world_size),
                cpu_selector,
                self.reserve_cpu_num,
            )
