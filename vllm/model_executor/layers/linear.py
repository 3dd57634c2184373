# SPDX-License-Identifier: Apache-2.0

from vllm.model_executor.layers.divisible import check_divisible


# fork: extend
class ColumnParallelLinear:
    # fork: edit a1982ba523ea
    def __init__(self, output_size: int, prefix: str):
        # fork: before self.output_size_per_partition
        check_divisible(prefix, "rows", [output_size], self.tp_size)


# fork: extend
class MergedColumnParallelLinear:
    # fork: edit 63be6cf25140
    def __init__(self, output_sizes: list[int], prefix: str):
        # fork: after self.tp_rank
        check_divisible(prefix, "rows", output_sizes, self.tp_size)


# fork: extend
class RowParallelLinear:
    # fork: edit db96f3dc4d17
    def __init__(self, input_size: int, prefix: str):
        # fork: before self.input_size_per_partition
        check_divisible(prefix, "columns", [input_size], self.tp_size)
