# SPDX-License-Identifier: Apache-2.0
"""Every checkpoint format on the CPU engine, against the reference on its dequantised file.

One engine start per entry of `ENGINES`, each in float32 and weight-only, so that what
remains is the rounding of float32 sums. The golden tables below need no engine.
"""

import random
from dataclasses import dataclass

import pytest
import torch

from tests.models.kimi_k3 import reference
from tests.models.kimi_k3.test_engine import BOUND, Engine, prompts_of
from vllm.checkpoint.tiny import TinyShape, make_tiny
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="CPU engine")

TP2 = dict(tensor_parallel_size=2)
EP2 = dict(tensor_parallel_size=2, enable_expert_parallel=True)

# Checkpoint -> options of make_tiny.
FILES = {
    "bf16": dict(format="bf16"),
    "nvfp4-modelopt": dict(format="nvfp4-modelopt"),
    "nvfp4-modelopt-bf16": dict(format="nvfp4-modelopt", attention="bf16"),
    "nvfp4-ct": dict(format="nvfp4-ct"),
    "nvfp4-ct-fp8": dict(format="nvfp4-ct", attention="fp8"),
    "mxfp4": dict(format="mxfp4"),
    "fp8-block-ct": dict(format="fp8-block-ct"),
}
# Engine -> (checkpoint, options of the engine).
ENGINES = {
    "bf16-ep2": ("bf16", EP2),
    "nvfp4-modelopt-tp1": ("nvfp4-modelopt", {}),
    "nvfp4-modelopt-tp2": ("nvfp4-modelopt", TP2),
    "nvfp4-ct-fp8-tp2": ("nvfp4-ct-fp8", TP2),
    "nvfp4-modelopt-bf16-ep2": ("nvfp4-modelopt-bf16", EP2),
    "nvfp4-ct-ep2": ("nvfp4-ct", EP2),
    "mxfp4-tp1": ("mxfp4", {}),
    "mxfp4-ep2": ("mxfp4", EP2),
    "fp8-block-ct-tp2": ("fp8-block-ct", TP2),
}
LENGTHS = [1, 2, 17, 63, 64, 65, 130]


def need(file: str) -> None:
    if "modelopt" in file:
        pytest.importorskip("modelopt", reason="writes a quantised checkpoint: pip install 'vllm[quantize]'")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Checkpoint by name, written when first asked for."""
    folder = tmp_path_factory.mktemp("formats")

    def path(name: str):
        need(name)
        if not (folder / name).exists():
            make_tiny(folder / name, seed=3, **FILES[name])
        return folder / name

    return path


# One engine of each quantised format: its weights are loaded twice.
RELOADED = ["nvfp4-modelopt-tp1", "nvfp4-ct-ep2", "mxfp4-tp1", "fp8-block-ct-tp2"]


@dataclass
class Served:
    """What an engine answered: to a batch, to a request alone, and to each length alone before and after a reload."""

    batch: list
    alone: list
    before: list
    after: list
    worst: float  # largest |delta log-prob| of all


@pytest.fixture(scope="module")
def served(files):
    """Answers by engine, each started when first asked for."""
    answers = {}

    def answer(name: str):
        if name not in answers:
            file, options = ENGINES[name]
            engine = Engine(files(file), enable_prefix_caching=False, **options)
            try:
                rng = random.Random(1)
                lengths = LENGTHS + [rng.choice([1, 2, 5, 40, 90]) for _ in range(9)]
                batch, worst = engine.run(prompts_of(lengths, 0, engine.vocab), prompt_logprobs=True)
                alone, worst_alone = engine.run(prompts_of([65], 5, engine.vocab), tokens=24)
                found = Served(batch, alone, [], [], max(worst, worst_alone))
                if name in RELOADED:
                    one_by_one(engine, found, found.before)
                    engine.llm.collective_rpc("reload_weights")
                    one_by_one(engine, found, found.after)
            finally:
                engine.close()
            answers[name] = found
        return answers[name]

    return answer


def one_by_one(engine, served, tables):
    """Answers to each length by itself: how requests are batched may change the last bits."""
    for prompt in prompts_of(LENGTHS, 7, engine.vocab):
        (output,), worst = engine.run([prompt], tokens=3)
        tables.append((output.outputs[0].token_ids, engine.table(output.outputs[0].logprobs)))
        served.worst = max(served.worst, worst)


@pytest.mark.parametrize("name", ENGINES)
def test_log_probs_equal_the_reference(served, name, record_property):
    """Every expert, block and shard where the rank needs it (PUBLIC_CASES 23 for FP8 at TP1 and TP2)."""
    worst = served(name).worst
    record_property("max_abs_delta_logprob", worst)
    assert worst <= BOUND


@pytest.mark.parametrize("name", RELOADED)
def test_a_second_load_changes_no_bit(served, name):
    """PUBLIC_CASES 36, and the same of every quantised format.

    On 0.28.0's way of loading, the padded rows of KDA's projection would be what memory held.
    """
    answers = served(name)
    assert len(answers.before) == len(answers.after) == len(LENGTHS)
    for (old, before), (new, after) in zip(answers.before, answers.after):
        assert old == new
        torch.testing.assert_close(before, after, rtol=0, atol=0)


@pytest.mark.parametrize(
    "modelopt, compressed",
    [("nvfp4-modelopt-bf16-ep2", "nvfp4-ct-ep2"), ("nvfp4-modelopt-tp2", "nvfp4-ct-fp8-tp2")],
)
def test_both_dialects_give_identical_answers(served, modelopt, compressed):
    """PUBLIC_CASES 31 on the engine.

    Of a request alone the log-probs are equal bit for bit; those of a batch depend in
    their last digits on which requests happen to be scheduled together.
    """
    here, there = served(compressed), served(modelopt)
    for ours, theirs in ((here.batch, there.batch), (here.alone, there.alone)):
        assert [o.outputs[0].token_ids for o in ours] == [o.outputs[0].token_ids for o in theirs]
    (ours,), (theirs,) = here.alone, there.alone
    for here, there in zip(ours.outputs[0].logprobs, theirs.outputs[0].logprobs, strict=True):
        assert {token: p.logprob for token, p in here.items()} == {token: p.logprob for token, p in there.items()}


# ---- golden tables -----------------------------------------------------------

SHAPE = TinyShape(
    layers="KKM",
    hidden=256,
    heads=2,
    q_lora=128,
    dense_width=128,
    experts=2,
    expert_width=64,
    latent=128,
    vocab=320,
)
FP8, NVFP4_MO = "ModelOptFp8PbWoLinearMethod", "ModelOptNvFp4FusedMoE"
FP8_CT, NVFP4_CT = "CompressedTensorsBlockFp8LinearMethod", "CompressedTensorsW4A4Nvfp4MoEMethod"
MXFP4, PLAIN, PLAIN_MOE = "Mxfp4MoEMethod", "UnquantizedLinearMethod", "UnquantizedFusedMoEMethod"

# Format -> method of (attention linears, routed experts); everything else is plain.
METHODS = {
    "bf16": (PLAIN, PLAIN_MOE),
    "nvfp4-modelopt": (FP8, NVFP4_MO),
    "nvfp4-modelopt-bf16": (PLAIN, NVFP4_MO),
    "nvfp4-ct": (PLAIN, NVFP4_CT),
    "nvfp4-ct-fp8": (FP8_CT, NVFP4_CT),
    "mxfp4": (PLAIN, MXFP4),
    "fp8-block-ct": (FP8_CT, PLAIN_MOE),
}
# Linears of the layers K (dense), K, M as vLLM runs them.
ATTENTION = {
    "0.self_attn.in_proj_qkvgfab",
    "0.self_attn.f_b_proj",
    "0.self_attn.o_proj",
    "1.self_attn.in_proj_qkvgfab",
    "1.self_attn.f_b_proj",
    "1.self_attn.o_proj",
    "2.self_attn.fused_qkv_a_proj",
    "2.self_attn.q_b_proj",
    "2.self_attn.kv_b_proj",
    "2.self_attn.g_proj",
    "2.self_attn.o_proj",
}
REST = {
    "0.self_attn.conv1d",
    "1.self_attn.conv1d",
    "0.mlp.gate_up_proj",
    "0.mlp.down_proj",
} | {
    f"{n}.block_sparse_moe.{m}"
    for n in (1, 2)
    for m in (
        "gate",
        "routed_expert_down_proj",
        "routed_expert_up_proj",
        "shared_experts.gate_up_proj",
        "shared_experts.down_proj",
    )
} | {f"{n}.{p}_res_proj" for n in (0, 1, 2) for p in ("self_attention", "mlp")}


def methods(path):
    """Name to method of every linear and expert bank that the engine would build."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.model_loader.utils import initialize_model

    config = EngineArgs(model=str(path), dtype="float32", trust_remote_code=True).create_engine_config()
    with set_current_vllm_config(config):
        model = initialize_model(vllm_config=config)
    return {
        name: type(layer.quant_method).__name__
        for name, layer in model.named_modules()
        if isinstance(layer, (LinearBase, RoutedExperts))
    }


def table(found, prefix=""):
    """Linears and banks of the decoder layers."""
    start = prefix + "model.layers."
    return {name.removeprefix(start): method for name, method in found.items() if name.startswith(start)}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("arch", ["text", "multimodal"])
def test_every_linear_has_the_method_of_the_golden_table(one_rank, name, arch, tmp_path):
    """PUBLIC_CASES 13, and 11: ignore lists name shards, and fused modules follow them."""
    need(name)
    make_tiny(tmp_path / "m", arch=arch, seed=3, shape=SHAPE, **FILES[name])
    found = methods(tmp_path / "m")
    prefix = "language_model." if arch == "multimodal" else ""
    layers = table(found, prefix)
    attention, experts = METHODS[name]
    banks = {n for n in layers if ".experts" in n}
    assert {n.partition(".experts")[0] for n in banks} == {"1.block_sparse_moe", "2.block_sparse_moe"}
    want = dict.fromkeys(ATTENTION, attention) | dict.fromkeys(REST, PLAIN) | dict.fromkeys(banks, experts)
    assert layers == want
    beside = {n: m for n, m in found.items() if not n.startswith(prefix + "model.layers.")}
    assert set(beside.values()) == {PLAIN}


@pytest.mark.parametrize(
    "ignored, fused",
    [
        ("model.layers.2.self_attn.kv_a_proj_with_mqa", "fused_qkv_a_proj"),
        ("model.layers.1.block_sparse_moe.shared_experts.gate_proj", "gate_up_proj"),
        ("model.layers.0.self_attn.b_proj", "in_proj_qkvgfab"),
    ],
)
def test_one_ignored_shard_of_a_fused_module_stops_the_engine(one_rank, ignored, fused, tmp_path):
    """PUBLIC_CASES 11: when the model is built, too, not only when headers are checked."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model

    make_tiny(tmp_path / "m", seed=3, shape=SHAPE, format="nvfp4-ct")
    config = EngineArgs(model=str(tmp_path / "m"), dtype="float32").create_engine_config()
    config.quant_config.ignore.remove(ignored)
    with set_current_vllm_config(config), pytest.raises(ValueError, match=f"{fused}: vLLM runs .* as one layer"):
        initialize_model(vllm_config=config)


@pytest.mark.parametrize("name", FILES)
def test_redundant_experts_are_refused(name, tmp_path):
    """PUBLIC_CASES 35: expert load balancing is not for this platform, whatever the format."""
    from vllm.engine.arg_utils import EngineArgs

    need(name)
    make_tiny(tmp_path / "m", seed=3, shape=SHAPE, **FILES[name])
    args = EngineArgs(
        model=str(tmp_path / "m"),
        dtype="float32",
        enable_eplb=True,
        eplb_config={"num_redundant_experts": 2},
        **EP2,
    )
    with pytest.raises(ValueError, match="(?i)expert parallelism load balancing|EPLB"):
        args.create_engine_config()


def test_the_batch_reaches_every_expert(files, monkeypatch):
    """Otherwise an expert could hold anything."""
    used: dict[str, set[int]] = {}
    route = reference.Model.route

    def spy(self, name, x):
        weights, ids = route(self, name, x)
        used.setdefault(name, set()).update(ids.flatten().tolist())
        return weights, ids

    monkeypatch.setattr(reference.Model, "route", spy)
    model = reference.load(files("bf16"))
    for prompt in prompts_of(LENGTHS, 0, model.config["vocab_size"]):
        model.logprobs(prompt)
    assert list(used.values()) == [set(range(8))] * 3


def test_bound_is_far_below_what_a_wrong_scale_does(files):
    """One expert's tensor scale doubled, or one 128-row block: a thousand times the bound."""
    tokens = prompts_of([130], 0, 512)[0]
    for name, weight, rows in (
        ("nvfp4-ct", "model.layers.1.block_sparse_moe.experts.0.w3.weight", slice(None)),
        ("fp8-block-ct", "model.layers.2.self_attn.kv_a_proj_with_mqa.weight", slice(512, 576)),
    ):
        model = reference.load(files(name))
        want = model.logprobs(tokens)
        model.weights[weight] = model.weights[weight].clone()
        model.weights[weight][rows] *= 2
        assert (model.logprobs(tokens) - want).abs().max() > 100 * BOUND, name
