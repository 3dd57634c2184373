# SPDX-License-Identifier: Apache-2.0
"""One descriptor of fused modules, and everything that follows from it."""

import json

import pytest
import torch

from tests.one_rank import one_rank_groups
from vllm.checkpoint import fused_modules as fused
from vllm.checkpoint.tensors import checkpoint_tensors
from vllm.checkpoint.tiny import make_tiny
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.utils.modelopt_names import shards_of
from vllm.model_executor.model_loader.utils import initialize_model


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The CPU model of a tiny quantised checkpoint, unloaded, and its config."""
    pytest.importorskip("modelopt", reason="pip install 'vllm[quantize]'")
    path = tmp_path_factory.mktemp("fused") / "tiny"
    make_tiny(path, format="nvfp4-modelopt")
    config = EngineArgs(model=str(path), dtype="float32").create_engine_config()
    one_rank_groups(config)
    with set_current_vllm_config(config):
        model = initialize_model(vllm_config=config)
    return model, config, json.loads((path / "config.json").read_text())


def test_rows_of_the_real_layers_follow_the_descriptor(built):
    """Order and sizes of every fused linear that the model builds."""
    model, _, raw = built
    rows = {name.removesuffix(".weight"): spec.shape[0] for name, spec in checkpoint_tensors(raw).items()}
    seen = set()
    for name, layer in model.named_modules():
        parent, _, last = name.rpartition(".")
        for module in fused.fused_modules():
            if last != module.name or not isinstance(layer, LinearBase):
                continue
            seen.add(last)
            if last == "conv1d":  # built as one linear; its loader places the shards
                assert layer.output_size == sum(rows[f"{parent}.{shard}"] for shard in module.shards)
                continue
            sizes = layer.output_sizes[: len(module.shards)]
            assert sizes == [rows[f"{parent}.{shard}"] for shard in module.shards]
            if hasattr(layer, "replicated_shard_id"):
                assert {module.shards[layer.replicated_shard_id]} == module.replicated
    assert seen == {module.name for module in fused.fused_modules()}


def test_model_and_quantisation_config_share_the_mapping(built):
    model, config, _ = built
    want = fused.packed_modules_mapping(fused.fused_modules())
    assert model.model.packed_modules_mapping == want
    assert want["in_proj_qkvgfab"] == ["q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"]
    for name, shards in want.items():
        assert config.quant_config.packed_modules_mapping[name] == shards
        assert shards_of(f"a.{name}", {}) == [f"a.{shard}" for shard in shards]


@pytest.mark.parametrize("gate", [True, False])
@pytest.mark.parametrize("query", [True, False])
def test_stacked_parameters_name_each_shard_once(gate, query):
    modules = fused.fused_modules(full_rank_gate=gate, low_rank_query=query)
    table = fused.stacked_params(modules)
    assert len({(name, shard) for name, shard, _ in table}) == len(table)
    by_name = {(name, shard): index for name, shard, index in table}
    assert by_name[".in_proj_qkvgfab", ".b_proj"] == (5 if gate else 3)
    assert by_name[".in_proj_qkvgfab", ".f_a_proj"] == 4
    assert ((".in_proj_qkvgfab", ".g_proj") in by_name) == gate
    assert ((".fused_qkv_a_proj", ".q_a_proj") in by_name) == query


def test_config_decides(built):
    class Config:
        linear_attn_config = {"use_full_rank_gate": False}
        q_lora_rank = None

    assert fused.fused_modules_of(Config) == fused.fused_modules(False, False)
    assert fused.fused_modules_of(built[1].model_config.hf_text_config) == fused.fused_modules()


def test_experts_are_called_as_in_the_file(built):
    """What a message says of them is a name that the file's index has."""
    model, _, raw = built
    names = set(checkpoint_tensors(raw))
    banks = [layer for layer in model.modules() if isinstance(layer, RoutedExperts)]
    assert banks
    for bank in banks:
        for linear in (bank.ckpt_gate_proj_name, bank.ckpt_up_proj_name, bank.ckpt_down_proj_name):
            assert f"{bank.layer_name}.0.{linear}.weight" in names


def test_a_scale_that_nobody_reads_stops_loading(built):
    """Named as in the file: here of a layer that the config leaves unquantised."""
    model, _, _ = built
    name = "model.layers.1.block_sparse_moe.routed_expert_up_proj.weight_scale"
    with pytest.raises(ValueError, match=rf"{name.removeprefix('model.')}: nobody reads this scale"):
        model.load_weights([(name, torch.ones(1, 1, 1, 1))])
