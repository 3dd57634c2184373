# SPDX-License-Identifier: Apache-2.0
from importlib.util import find_spec
from pathlib import Path

import pytest

from vllm.checkpoint.tiny import TinyShape, make_tiny

# Partial blocks everywhere: 576-row kv_a, 2-row b_proj, 48-column f_b, 192-row q_a.
SHAPE = TinyShape(
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
def shape() -> TinyShape:
    return SHAPE


@pytest.fixture(scope="session")
def bf16(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "bf16"
    make_tiny(path, shape=SHAPE, seed=3)
    return path


@pytest.fixture(scope="session")
def multimodal(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("tiny") / "multimodal"
    make_tiny(path, arch="multimodal", shape=SHAPE, seed=3)
    return path


@pytest.fixture(scope="session")
def nvfp4(tmp_path_factory) -> Path:
    if find_spec("modelopt") is None:
        pytest.skip("nvidia-modelopt is not installed (pip install 'vllm[quantize]')")
    path = tmp_path_factory.mktemp("tiny") / "nvfp4"
    make_tiny(path, format="nvfp4-modelopt", shape=SHAPE, seed=3)
    return path
