# SPDX-License-Identifier: Apache-2.0
"""A fixture for layers that ask for process groups; the folders that use it import it."""

import socket

import pytest


@pytest.fixture(scope="module")
def one_rank():
    """A vLLM config and one-rank process groups, for layers that ask for them."""
    import torch

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = VllmConfig()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            address = f"tcp://127.0.0.1:{port}"
            parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)
        yield config
