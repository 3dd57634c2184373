# SPDX-License-Identifier: Apache-2.0
"""Process groups of one rank, for layers and models that are built without an engine."""

import pytest


def one_rank_groups(config) -> None:
    """Makes the groups once a process; later calls find them, whatever size a test has patched in meanwhile."""
    import torch

    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state

    if parallel_state.model_parallel_is_initialized():
        return
    store = torch.distributed.HashStore()  # in this process: no port to collide on
    with set_current_vllm_config(config):
        torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
        parallel_state.init_distributed_environment(1, 0, "", 0, "gloo")
        parallel_state.initialize_model_parallel(1, 1)


@pytest.fixture(scope="module")
def one_rank():
    """The groups, and a vLLM config that stays current while the module's tests run."""
    from vllm.config import VllmConfig, set_current_vllm_config

    config = VllmConfig()
    one_rank_groups(config)
    with set_current_vllm_config(config):
        yield config
