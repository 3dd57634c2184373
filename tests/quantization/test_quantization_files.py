# SPDX-License-Identifier: Apache-2.0
"""Where a ModelOpt checkpoint says how it is quantised, as an engine reads it."""

import json
import shutil

import pytest

from tests.models.kimi_k3.test_formats import SHAPE
from vllm.checkpoint.errors import CheckpointError
from vllm.checkpoint.tiny import make_tiny
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig

pytest.importorskip("modelopt", reason="writes a quantised checkpoint: pip install 'vllm[quantize]'")

PLACES = ["both", "config.json", "hf_quant_config.json"]


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    path = tmp_path_factory.mktemp("files") / "good"
    make_tiny(path, format="nvfp4-modelopt", seed=1, shape=SHAPE)
    return path


@pytest.fixture
def folder(good, tmp_path):
    return shutil.copytree(good, tmp_path / "copy")


def edit(folder, name, change):
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))


def read(folder):
    args = EngineArgs(model=str(folder), dtype="float32", trust_remote_code=True)
    return args.create_engine_config().quant_config


@pytest.mark.parametrize("place", PLACES)
def test_every_place_gives_the_same_config(good, folder, place):
    """PUBLIC_CASES 4: in either file alone, or equal in both."""
    if place == "config.json":
        (folder / "hf_quant_config.json").unlink()
    if place == "hf_quant_config.json":
        edit(folder, "config.json", lambda content: content.pop("quantization_config"))
    got, want = read(folder), read(good)
    assert type(got) is type(want) is ModelOptMixedPrecisionConfig
    assert got.canonical_layers() == want.canonical_layers()
    assert set(want.canonical_layers().values()) == {"NVFP4", "FP8_PB_WO"}
    assert set(got.exclude_modules) == set(want.exclude_modules)
    assert got.kv_cache_quant_method is want.kv_cache_quant_method is None


CONFLICTS = {
    "quantized_layers": lambda quant: quant["quantized_layers"].popitem(),
    "quant_algo": lambda quant: quant.update(quant_algo="NVFP4"),
}


@pytest.mark.parametrize("key", CONFLICTS)
def test_files_that_disagree_are_refused(folder, key):
    """PUBLIC_CASES 4, the conflict: neither file wins; the engine stops before it reads a weight."""
    edit(folder, "hf_quant_config.json", lambda content: CONFLICTS[key](content["quantization"]))
    with pytest.raises(CheckpointError, match=f"config.json and hf_quant_config.json disagree about {key}"):
        read(folder)
