# SPDX-License-Identifier: Apache-2.0
from importlib.util import find_spec
from pathlib import Path

import pytest

# vllm is imported inside the fixtures, so that collecting tests costs no start of it.

# Partial blocks everywhere: 576-row kv_a, 2-row b_proj, 48-column f_b, 192-row q_a.
SHAPE = dict(
    hidden=256,
    heads=2,
    head_dim=48,
    q_lora=192,
    dense_width=128,
    experts=4,
    expert_width=64,
    latent=128,
    vocab=320,
)


@pytest.fixture(scope="session")
def shape():
    from vllm.checkpoint.tiny import TinyShape

    return TinyShape(**SHAPE)


@pytest.fixture(scope="session")
def write(shape, tmp_path_factory):
    """Writes a checkpoint of the session's shape and returns its folder."""
    from vllm.checkpoint.tiny import make_tiny

    def checkpoint(name: str, **options) -> Path:
        path = tmp_path_factory.mktemp("tiny") / name
        make_tiny(path, shape=shape, seed=3, **options)
        return path

    return checkpoint


@pytest.fixture(scope="session")
def bf16(write) -> Path:
    return write("bf16")


@pytest.fixture(scope="session")
def multimodal(write) -> Path:
    return write("multimodal", arch="multimodal")


@pytest.fixture(scope="session")
def nvfp4(write) -> Path:
    if find_spec("modelopt") is None:
        pytest.skip("nvidia-modelopt is not installed (pip install 'vllm[quantize]')")
    return write("nvfp4", format="nvfp4-modelopt")
