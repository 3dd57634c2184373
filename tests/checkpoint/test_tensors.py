# SPDX-License-Identifier: Apache-2.0
"""The descriptor against the published sizes of Kimi K3."""

import math

import pytest

from vllm.checkpoint.tensors import checkpoint_tensors, is_kda_layer, is_moe_layer, text_tensors

MLA_LAYERS = [*range(4, 93, 4), 93]
KIMI_K3 = {
    "architectures": ["KimiLinearForCausalLM"],
    "vocab_size": 163840,
    "hidden_size": 7168,
    "num_hidden_layers": 93,
    "num_attention_heads": 96,
    "intermediate_size": 33792,
    "linear_attn_config": {
        "kda_layers": [n for n in range(1, 94) if n not in MLA_LAYERS],
        "full_attn_layers": MLA_LAYERS,
        "num_heads": 96,
        "head_dim": 128,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
    },
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_output_gate": True,
    "num_experts": 896,
    "moe_intermediate_size": 3072,
    "routed_expert_hidden_size": 3584,
    "latent_moe_use_norm": True,
    "num_shared_experts": 2,
    "first_k_dense_replace": 1,
    "attn_res_block_size": 12,
}


@pytest.fixture(scope="module")
def specs():
    return text_tensors(KIMI_K3)


def elements(spec) -> int:
    return math.prod(spec.shape)


def test_parameter_count_is_the_published_one(specs):
    assert sum(map(elements, specs.values())) == pytest.approx(2.78e12, rel=2e-3)


def test_active_parameters_are_the_published_ones(specs):
    active = sum(
        elements(spec) * (16 / 896 if spec.kind.startswith("expert.") else 1)
        for spec in specs.values()
        if spec.kind != "embedding"
    )
    assert active == pytest.approx(104e9, rel=5e-3)


def test_mixed_format_has_the_published_size(specs):
    size = 0.0
    for spec in specs.values():
        if spec.kind.startswith("expert."):
            size += elements(spec) * (1 / 2 + 1 / 16)
        elif spec.kind.startswith(("kda.", "mla.")) and spec.dtype == "BF16":
            size += elements(spec)
        else:
            size += elements(spec) * (2 if spec.dtype == "BF16" else 4)
    assert size == pytest.approx(1.61e12, rel=2e-3)


@pytest.mark.parametrize(
    "name, shape, dtype",
    [
        ("model.embed_tokens.weight", (163840, 7168), "BF16"),
        ("model.layers.0.self_attn.g_proj.weight", (12288, 7168), "BF16"),
        ("model.layers.0.self_attn.b_proj.weight", (96, 7168), "BF16"),
        ("model.layers.0.self_attn.f_a_proj.weight", (128, 7168), "BF16"),
        ("model.layers.0.self_attn.f_b_proj.weight", (12288, 128), "BF16"),
        ("model.layers.0.self_attn.k_conv1d.weight", (12288, 1, 4), "F32"),
        ("model.layers.0.self_attn.A_log", (96,), "F32"),
        ("model.layers.0.self_attn.dt_bias", (12288,), "F32"),
        ("model.layers.0.self_attn.o_norm.weight", (128,), "F32"),
        ("model.layers.0.mlp.down_proj.weight", (7168, 33792), "BF16"),
        ("model.layers.3.self_attn.q_a_proj.weight", (1536, 7168), "BF16"),
        ("model.layers.3.self_attn.q_b_proj.weight", (18432, 1536), "BF16"),
        ("model.layers.3.self_attn.kv_a_proj_with_mqa.weight", (576, 7168), "BF16"),
        ("model.layers.3.self_attn.kv_b_proj.weight", (24576, 512), "BF16"),
        ("model.layers.92.self_attn.o_proj.weight", (7168, 12288), "BF16"),
        ("model.layers.1.block_sparse_moe.gate.weight", (896, 7168), "BF16"),
        ("model.layers.1.block_sparse_moe.gate.e_score_correction_bias", (896,), "F32"),
        ("model.layers.1.block_sparse_moe.routed_expert_up_proj.weight", (7168, 3584), "BF16"),
        ("model.layers.1.block_sparse_moe.shared_experts.up_proj.weight", (6144, 7168), "BF16"),
        ("model.layers.1.block_sparse_moe.experts.895.w2.weight", (3584, 3072), "BF16"),
        ("model.output_attn_res_proj.weight", (1, 7168), "BF16"),
    ],
)
def test_published_shapes(specs, name, shape, dtype):
    assert (specs[name].shape, specs[name].dtype) == (shape, dtype)


def test_layer_kinds(specs):
    assert [n + 1 for n in range(93) if not is_kda_layer(KIMI_K3, n)] == MLA_LAYERS
    assert [n for n in range(93) if not is_moe_layer(KIMI_K3, n)] == [0]
    assert specs["model.layers.0.self_attn.A_log"].zero_tail_axis == 0


def test_multimodal_names_have_the_prefix_and_the_vision_tower(multimodal, bf16):
    import json

    text, both = (checkpoint_tensors(json.loads((p / "config.json").read_text())) for p in (bf16, multimodal))
    prefixed = {f"language_model.{name}": spec for name, spec in text.items()}
    vision = {name for name in both if name not in prefixed}
    assert {name: both[name] for name in prefixed} == prefixed
    assert vision and all(name.startswith(("vision_tower.", "mm_projector.")) for name in vision)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"linear_attn_config": None}, "'linear_attn_config' is missing"),
        ({"kv_lora_rank": None}, "'kv_lora_rank' is missing"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        (
            {"linear_attn_config": {**KIMI_K3["linear_attn_config"], "full_attn_layers": MLA_LAYERS[1:]}},
            "layer 4 .* exactly one",
        ),
        (
            {"linear_attn_config": {**KIMI_K3["linear_attn_config"], "head_dim": None}},
            "linear_attn_config.head_dim",
        ),
    ],
)
def test_configs_that_decide_no_shape_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        checkpoint_tensors({**KIMI_K3, **change})


def test_low_rank_gate_and_plain_queries_of_kimi_linear():
    config = {
        **KIMI_K3,
        "num_hidden_layers": 4,
        "linear_attn_config": {**KIMI_K3["linear_attn_config"], "use_full_rank_gate": False},
        "q_lora_rank": None,
        "mla_use_output_gate": False,
        "routed_expert_hidden_size": None,
        "attn_res_block_size": None,
        "num_experts": 1,
    }
    specs = text_tensors(config)
    assert specs["model.layers.0.self_attn.g_a_proj.weight"].shape == (128, 7168)
    assert specs["model.layers.3.self_attn.q_proj.weight"].shape == (18432, 7168)
    assert specs["model.layers.1.block_sparse_moe.experts.0.w1.weight"].shape == (3072, 7168)
    assert not any("attn_res" in spec.kind or "self_attn.g_proj" in name for name, spec in specs.items())
