# SPDX-License-Identifier: Apache-2.0
"""compressed-tensors on Kimi K3: names, block FP8 linears, NVFP4 linears."""

import pytest
import torch

from tests.quantization.test_modelopt import Tensor, as_rank, check, finish, load  # noqa: F401
from vllm.model_executor.layers import linear
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (  # noqa: E501
    CompressedTensorsConfig,
)
from vllm.model_executor.layers.quantization.compressed_tensors.names import expert_linears, find_target
from vllm.model_executor.models.utils import WeightsMapper
from vllm.platforms import current_platform

pytestmark = [
    pytest.mark.skipif(not current_platform.is_cpu(), reason="CPU kernels"),
    pytest.mark.usefixtures("one_rank"),
]

ROOTS = ("", "model.", "language_model.model.")
FUSED = {
    "gate_up_proj": ["gate_proj", "up_proj"],
    "fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"],
    "in_proj_qkvgfab": ["q_proj", "k_proj", "v_proj", "g_proj", "f_a_proj", "b_proj"],
}


# ---- names -------------------------------------------------------------------


def target(name, ignore=(), schemes=None, cls="MergedColumnParallelLinear", mapping=FUSED):
    return find_target(name, cls, {"Linear": 1} if schemes is None else schemes, ignore, mapping)


@pytest.mark.parametrize("root", ROOTS)
@pytest.mark.parametrize("written", ROOTS)
@pytest.mark.parametrize(
    "fused, shards",
    [
        ("layers.0.mlp.gate_up_proj", FUSED["gate_up_proj"]),
        ("layers.1.block_sparse_moe.shared_experts.gate_up_proj", FUSED["gate_up_proj"]),
        ("layers.3.self_attn.fused_qkv_a_proj", FUSED["fused_qkv_a_proj"]),
        ("layers.0.self_attn.in_proj_qkvgfab", FUSED["in_proj_qkvgfab"]),
    ],
)
def test_a_fused_module_is_ignored_with_all_its_shards_only(root, written, fused, shards):
    """PUBLIC_CASES 11, and 7: whatever root the file and the model give their names."""
    parent = fused.rpartition(".")[0]
    names = [f"{written}{parent}.{shard}" for shard in shards]
    assert target(root + fused, names) is None
    assert target(root + fused, [f"re:.*{parent.replace('.', chr(92) + '.')}\\.{s}$" for s in shards]) is None
    assert target(root + fused) == "Linear"
    for left_out in range(len(shards)):
        some = names[:left_out] + names[left_out + 1 :]
        with pytest.raises(ValueError, match=rf"{fused}: .*{shards[left_out]} follows 'Linear'"):
            target(root + fused, some)


def test_the_message_says_which_shard_is_treated_how():
    with pytest.raises(
        ValueError,
        match=r"m.0.mlp.gate_up_proj: vLLM runs \['gate_proj', 'up_proj'\] as one layer.*"
        r"gate_proj is not quantised, up_proj follows 'Linear'.*ignore all of them",
    ):
        target("m.0.mlp.gate_up_proj", ["m.0.mlp.gate_proj"])


def test_a_pattern_for_one_shard_does_not_decide_for_the_fused_name():
    """``kv_a_proj`` stands inside ``fused_qkv_a_proj`` too."""
    name = "model.layers.3.self_attn.fused_qkv_a_proj"
    with pytest.raises(ValueError, match="q_a_proj follows 'Linear'"):
        target(name, ["re:.*kv_a_proj.*"])


def test_the_fused_name_itself_may_be_ignored_or_targeted():
    name = "model.layers.3.self_attn.fused_qkv_a_proj"
    assert target(name, [name]) is None
    assert target(name, schemes={name: 1}) == name


@pytest.mark.parametrize(
    "pattern, ignored",
    [
        (r"re:^model\.layers\.0\..*b_proj$", True),
        (r"re:.*self_attn.*", True),
        (r"re:self_attn", False),  # from the start of the name
        ("model.layers.0.self_attn.b_proj", True),
        ("b_proj", False),
        ("*b_proj", False),  # no glob in this dialect
    ],
)
@pytest.mark.parametrize("root", ROOTS)
def test_patterns_decide_alike_under_every_root(pattern, ignored, root):
    """PUBLIC_CASES 8."""
    name = f"{root}layers.0.self_attn.b_proj"
    assert (target(name, [pattern], cls="ReplicatedLinear") is None) == ignored


def test_shards_may_follow_different_targets_of_one_scheme():
    schemes = {r"re:.*\.q_a_proj$": {"bits": 8}, r"re:.*\.kv_a_proj_with_mqa$": {"bits": 8}}
    assert target("a.fused_qkv_a_proj", schemes=schemes) == r"re:.*\.q_a_proj$"
    schemes[r"re:.*\.kv_a_proj_with_mqa$"] = {"bits": 4}
    with pytest.raises(ValueError, match="different schemes"):
        target("a.fused_qkv_a_proj", schemes=schemes)
    with pytest.raises(ValueError, match="kv_a_proj_with_mqa is not quantised"):
        target("a.fused_qkv_a_proj", schemes={r"re:.*\.q_a_proj$": 1})


def test_a_target_by_name_goes_before_one_by_class():
    schemes = {"Linear": 1, "re:.*o_proj": 2}
    assert target("a.o_proj", schemes=schemes, cls="RowParallelLinear") == "re:.*o_proj"
    assert target("a.f_b_proj", schemes=schemes, cls="ColumnParallelLinear") == "Linear"
    assert target("lm_head", schemes=schemes, cls="ParallelLMHead") is None


@pytest.mark.parametrize("last", ["experts", "experts.routed_experts"])
def test_expert_linears_have_the_checkpoint_s_names(last):
    names = ("gate_proj", "up_proj", "down_proj")
    assert expert_linears(f"a.1.block_sparse_moe.{last}", names) == [
        f"a.1.block_sparse_moe.experts.0.{n}" for n in ("w1", "w3", "w2")
    ]
    assert expert_linears(f"a.1.mlp.{last}", names) == [f"a.1.mlp.experts.0.{n}" for n in names]


# ---- block FP8 ---------------------------------------------------------------


def args(**weights):
    return {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, **weights}


def config(weights, inputs=None, ignore=(), format="float-quantized"):
    return CompressedTensorsConfig.from_config(
        {
            "format": format,
            "ignore": list(ignore),
            "config_groups": {"g": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        }
    )


def fp8(**kwargs):
    return config(
        args(strategy="block", block_structure=[128, 128]),
        args(strategy="group", group_size=128) | {"dynamic": True},
        **kwargs,
    )


def stored(tensor, dtype=torch.float32):
    return {"weight": tensor.weight, "weight_scale": tensor.scale.to(dtype)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows,cols", [(256, 256), (96, 256), (576, 128), (4, 192), (130, 300)])
@pytest.mark.parametrize("cls", ["ReplicatedLinear", "ColumnParallelLinear", "RowParallelLinear"])
def test_block_fp8_layer_equals_the_dequantised_checkpoint(cls, rows, cols, dtype):
    """The scale has rank 2 and may be stored in the model's dtype."""
    t = Tensor(rows, cols)
    layer = getattr(linear, cls)(cols, rows, bias=False, quant_config=fp8(), prefix="m.o_proj")
    load(layer, stored(t, dtype))
    check(finish(layer), t.dense())


@pytest.mark.parametrize("size", [1, 2])
def test_block_fp8_ranks_hold_their_slices(as_rank, size):  # noqa: F811
    """192 rows at TP2: rank 1 starts in the middle of a block."""
    t = Tensor(384, 256)
    for rank in range(size):
        as_rank(rank, size)
        layer = linear.ColumnParallelLinear(256, 384, bias=False, quant_config=fp8(), prefix="m.q_b_proj")
        load(layer, stored(t))
        finish(layer)
        rows = 384 // size
        got = layer.quant_method.dequantized_weight(layer, torch.float32)
        assert torch.equal(got.double(), t.dense()[rank * rows : (rank + 1) * rows])


def test_block_fp8_shards_of_a_fused_layer_keep_their_partial_blocks():
    """PUBLIC_CASES 14: 576 rows are 4.5 blocks, and what is fused behind them starts anew."""
    a, b = Tensor(256, 256, 1), Tensor(576, 256, 2)
    layer = linear.MergedColumnParallelLinear(
        256, [256, 576], bias=False, quant_config=fp8(), prefix="m.fused_qkv_a_proj", disable_tp=True
    )
    for shard, t in enumerate((a, b)):
        load(layer, stored(t), shard)
    check(finish(layer), torch.cat((a.dense(), b.dense())))


@pytest.mark.parametrize("shape", [(2, 1), (3, 2), (4,)])
def test_a_wrong_block_count_names_the_layer(shape):
    layer = linear.ReplicatedLinear(256, 256, bias=False, quant_config=fp8(), prefix="m.o_proj")
    with pytest.raises(ValueError, match=r"m.o_proj.weight_scale: expected float32 with 2x2 blocks"):
        load(layer, {"weight_scale": torch.ones(shape)})


def test_other_block_sizes_and_static_inputs_go_their_own_way():
    from vllm.model_executor.layers.quantization.compressed_tensors.block_fp8 import is_block_fp8

    def scheme(quant):
        return quant.get_scheme_dict(linear.ReplicatedLinear(8, 8, bias=False), "m.o_proj")

    assert is_block_fp8(scheme(fp8()))
    assert is_block_fp8(scheme(config(args(strategy="block", block_structure=[128, 128]))))
    assert not is_block_fp8(scheme(config(args(strategy="block", block_structure=[64, 128]))))
    assert not is_block_fp8(scheme(config(args(strategy="channel"))))
    assert not is_block_fp8(scheme(fp8(ignore=["m.o_proj"])))


# ---- NVFP4 -------------------------------------------------------------------


def nvfp4(weight_only):
    weights = args(strategy="tensor_group", group_size=16) | {"num_bits": 4}
    return config(weights, None if weight_only else weights | {"dynamic": "local"}, format="nvfp4-pack-quantized")


def random_nvfp4(rows, columns, divisor, seed):
    gen = torch.Generator().manual_seed(seed)
    return {
        "weight_packed": torch.randint(0, 256, (rows, columns // 2), generator=gen, dtype=torch.uint8),
        "weight_scale": (torch.rand(rows, columns // 16, generator=gen) * 3 + 0.25).to(torch.float8_e4m3fn),
        "weight_global_scale": torch.tensor([divisor]),
        "input_global_scale": torch.tensor([1.0]),
    }


def dense(t):
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    packed = t["weight_packed"].long()
    codes = torch.stack((packed % 16, packed // 16), -1).flatten(1)
    values = levels[codes % 8] * torch.where(codes >= 8, -1.0, 1.0)
    return values * t["weight_scale"].double().repeat_interleave(16, 1) / t["weight_global_scale"].double()


@pytest.mark.parametrize("weight_only", [False, True])
@pytest.mark.parametrize("ratio", [1.0, 4.0, 1.25, 0.25])
def test_shards_of_an_nvfp4_linear_keep_their_own_divisor(ratio, weight_only):
    """PUBLIC_CASES 29 for linears: the larger divisor is the smaller scale."""
    shards = [random_nvfp4(32, 64, 512.0, 1), random_nvfp4(48, 64, 512.0 * ratio, 2)]
    layer = linear.MergedColumnParallelLinear(
        64, [32, 48], bias=False, quant_config=nvfp4(weight_only), prefix="m.gate_up_proj"
    )
    for number, t in enumerate(shards):
        load(layer, {k: v for k, v in t.items() if not (weight_only and k.startswith("input"))}, number)
    finish(layer)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3))
    want = x.double() @ torch.cat([dense(t) for t in shards]).T
    assert (layer(x)[0] - want).abs().max() <= 2e-6 * want.abs().max()


@pytest.mark.parametrize("name, value", [("weight_global_scale", 0.0), ("weight_global_scale", None)])
def test_a_bad_divisor_of_a_linear_is_named(name, value):
    t = random_nvfp4(32, 64, 512.0, 1)
    t.pop(name) if value is None else t[name].fill_(value)
    layer = linear.ReplicatedLinear(64, 32, bias=False, quant_config=nvfp4(False), prefix="m.o_proj")
    load(layer, t)
    with pytest.raises(ValueError, match=rf"m\.o_proj\.{name}: (missing|found 0.0)"):
        finish(layer)


# ---- the mapper --------------------------------------------------------------


def test_a_root_rename_changes_no_decision():
    quant = fp8(ignore=["language_model.layers.0.self_attn.o_proj", r"re:language_model\.layers\.1\..*"])
    layer = linear.ReplicatedLinear(8, 8, bias=False)
    names = [f"language_model.model.layers.{n}.self_attn.o_proj" for n in range(3)]
    before = [quant.get_scheme_dict(layer, name) is None for name in names]
    rename = {"language_model.layers.": "language_model.model.layers."}
    quant.apply_vllm_mapper(WeightsMapper(orig_to_new_prefix=rename))
    after = [quant.get_scheme_dict(layer, name) is None for name in names]
    assert before == after == [True, True, False]
