# SPDX-License-Identifier: Apache-2.0
"""The trained tiny model, its training form, and one cell of the gate."""

import argparse
import json
import random
import re

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.accuracy.train_tiny import NEEDED, SHAPE, Trainable, exact_match, fresh
from benchmarks.exactness.engine_logprobs import statistics
from tests.accuracy.faults import FAULTS
from tests.accuracy.texts import text
from tests.models.kimi_k3 import reference
from tools import accuracy
from tools.systematic import Watched, directions, systematic
from vllm.checkpoint.tiny import text_config

pytest.importorskip("lm_eval", reason="judges the served model: pip install 'vllm[accuracy]'")
pytest.importorskip("modelopt", reason="writes a quantised checkpoint: pip install 'vllm[quantize]'")


CONFIG = text_config(SHAPE)


@pytest.fixture(scope="module")
def weights():
    """The stored model, BF16 values in float32."""
    return {name: values.float() for name, values in load_file(accuracy.TRAINED / "weights.safetensors").items()}


def scores(weights, texts: int = 16) -> dict[str, float]:
    return exact_match(Trainable(CONFIG, weights), texts, 304, 5)


@pytest.mark.parametrize("decay", [0.0, 4.0], ids=["slow", "fast"])
def test_the_form_that_is_trained_equals_the_reference(decay):
    """Chunks against the recurrence, up to decays of e^-5 a token, where exponents are largest."""
    weights = fresh()
    for name, values in weights.items():
        if name.endswith("dt_bias"):
            values += decay
    tokens = torch.tensor([list(text(random.Random(n), 64)[0].encode()) for n in range(2)])
    with torch.inference_mode():
        got = Trainable(CONFIG, weights).logits(tokens).log_softmax(-1)
    for row in range(2):
        want = reference.Model(CONFIG, weights).logprobs(tokens[row].tolist())
        torch.testing.assert_close(got[row], want, atol=1e-4, rtol=0)


def test_the_stored_model_knows_its_tasks(weights):
    """Answers of texts from a seed of its own."""
    found = scores(weights)
    assert min(found.values()) >= accuracy.KNOWS, found


def without(weights, part: str):
    """The same model with zeros for weights whose names hold `part`."""
    taken = {name: torch.zeros_like(w) for name, w in weights.items() if part in name}
    assert taken
    return weights | taken


@pytest.mark.parametrize("part", [*NEEDED, ".f_b_proj"])
def test_answers_need_each_part(weights, part):
    """KDA, MLA, the routed experts, each output gate, layer by layer, and what KDA forgets by."""
    assert accuracy.mean(scores(without(weights, part), 4)) < accuracy.mean(scores(weights, 4)) - 0.1


@pytest.mark.parametrize("part", ["0.mlp.down_proj", "shared_experts.down_proj", ".A_log"])
def test_log_probs_need_every_other_part(weights, part):
    """What no answer depends on still shows, far above the bound."""
    tokens = list(text(random.Random(0), 130)[0].encode())
    whole, less = (reference.Model(CONFIG, w).logprobs(tokens) for w in (weights, without(weights, part)))
    assert statistics(less, whole)["mean_kl"] > 1000 * accuracy.BOUNDS["float32"].divergence


def good(dtype: str) -> dict:
    scores = {"recall": 1.0, "addition": 1.0, "sorting": 1.0}
    side = {"mean_kl": 0.0, "mean_abs": 0.0, "argmax_agrees": 1.0, "systematic": 0.0}
    row = {"format": "bf16", "dtype": dtype, "fp8_activations": False}
    return row | {"exact_match": scores, "reference_exact_match": scores, "own": side, "bf16": side}


@pytest.mark.parametrize("dtype", accuracy.BOUNDS)
@pytest.mark.parametrize(
    "change, message",
    [
        ({"own": {"mean_kl": 0.1}}, "KL to its own reference 1.0e-01 > "),
        ({"own": {"mean_kl": float("nan")}}, "KL to its own reference nan > "),
        ({"own": {"mean_abs": 0.1}}, "mean |Δ log-prob| 1.0e-01 > "),
        ({"own": {"argmax_agrees": 0.9}}, "top-1 0.900 < "),
        ({"bf16": {"mean_kl": 1.0}}, "KL to the BF16 model 1.0e+00 > "),
        ({"exact_match": {"recall": 0.9}}, "recall 0.900, the reference 1.000"),
    ],
)
def test_each_bound_is_kept(dtype, change, message):
    assert accuracy.misses(good(dtype)) == []
    row = good(dtype)
    assert message in "; ".join(accuracy.misses(row | {key: row[key] | new for key, new in change.items()}))


def test_the_systematic_part_is_kept_too():
    row = good("bfloat16")
    row["own"] = row["own"] | {"systematic": 0.1}
    assert "systematic part 1.0e-01 > " in "; ".join(accuracy.misses(row))


def test_a_change_of_a_part_is_systematic_and_noise_is_not():
    weights = fresh()
    texts = [list(text(random.Random(n), 24)[0].encode()) for n in range(2)]
    model = reference.Model(CONFIG, weights)
    along = directions(model, texts)
    noise = 0.02 * torch.randn(along.shape[1:], generator=torch.Generator().manual_seed(0))
    assert systematic(noise, along) < 0.2 * 0.02
    experts = {name: 1.01 * w for name, w in weights.items() if ".experts." in name and name.endswith("w3.weight")}
    change = torch.cat([reference.Model(CONFIG, weights | experts).logprobs(t) - model.logprobs(t) for t in texts])
    assert systematic(change + noise, along) > 0.8 * change.square().mean().sqrt()


def test_margins_say_how_far_logits_must_move_to_choose_another_expert():
    """The last expert chosen a bit down and the next one a bit up: less than the margin, and more."""
    weights, name = fresh(), "model.layers.1.block_sparse_moe"
    model = Watched(CONFIG, weights)
    x = torch.randn(400, SHAPE.hidden, generator=torch.Generator().manual_seed(1))
    model.route(name, x)
    (margins,) = model.margins
    near = margins < 0.1  # where the sigmoid is straight
    assert near.sum() > 5
    logits = x[near] @ weights[f"{name}.gate.weight"].T
    bias = weights[f"{name}.gate.e_score_correction_bias"]
    order = (logits.sigmoid() + bias).argsort(-1, descending=True)
    for share, same in ((0.9, True), (1.1, False)):
        moved = logits.clone()
        for token, (margin, experts) in enumerate(zip(margins[near], order, strict=True)):
            moved[token, experts[SHAPE.top_k - 1]] -= share * margin
            moved[token, experts[SHAPE.top_k]] += share * margin
        chosen = (moved.sigmoid() + bias).topk(SHAPE.top_k, -1).indices.sort().values
        assert ((chosen == order[:, : SHAPE.top_k].sort().values).all(-1) == same).all()


def test_a_checkpoint_that_is_there_is_taken(tmp_path, monkeypatch):
    from vllm.checkpoint import tiny

    path = accuracy.write("bf16", tmp_path)
    monkeypatch.setattr(tiny, "make_tiny", lambda *_, **__: pytest.fail("written again"))
    assert accuracy.write("bf16", tmp_path) == path
    monkeypatch.setitem(accuracy.FORMATS, "bf16", {"seed": 1})
    with pytest.raises(pytest.fail.Exception, match="written again"):
        accuracy.write("bf16", tmp_path)


def test_tables_go_between_their_marks(tmp_path):
    page = tmp_path / "page.md"
    kinds = ("matrix", "summary", "faults")
    marks = [f"<!-- {end}{kind} float32 cpu -->\n" for kind in kinds for end in ("", "end of ")]
    page.write_text("before\n" + marks[0] + "old\n" + marks[1] + "between\n" + "".join(marks[2:]) + "after\n")
    healthy = good("float32") | {"device": "cpu", "engine": "tp1", "fault": None, "misses": []}
    worse = healthy | {"engine": "tp2", "own": healthy["own"] | {"mean_kl": 1e-9}}
    faulty = healthy | {"fault": "gate_up_swapped", "exact_match": {"recall": 0.5}, "misses": ["KL"]}
    broken = {key: healthy[key] for key in ("device", "format", "engine", "dtype", "fault")} | {"error": "no server"}
    elsewhere = healthy | {"device": "gpu", "engine": "on a GPU"}
    accuracy.document(page, [healthy, worse, faulty, broken, elsewhere])
    before, matrix, between, summary, _, faults, after = re.split(r"<!-- .* -->\n", page.read_text())
    assert (before, between, after) == ("before\n", "between\n", "after\n")
    assert "old" not in matrix and "GPU" not in matrix and matrix.count("no server") == 1
    assert [line.count("|") for line in matrix.splitlines()] == [len(accuracy.COLUMNS) + 1] * 5
    assert "bf16 | tp1, tp2 | 1.000 | 1.000 | 1.0e-09" in summary
    assert "gate up swapped | bf16 | tp1 | 0.500 | 1.000" in faults and "| yes | yes |" in faults


def test_a_row_takes_the_place_of_the_earlier_one_of_its_cell(tmp_path):
    row = good("float32") | {"device": "cpu", "engine": "tp1", "fault": None}
    for change in ({"seconds": 1}, {"seconds": 2}, {"seconds": 3, "engine": "tp2"}):
        accuracy.keep(tmp_path / "rows.json", {"vllm": "1"}, row | change)
    kept = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert [row["seconds"] for row in kept] == [2, 3]


def test_one_cell_is_within_its_bounds(tmp_path):
    """A server, lm-eval and log-probs: the published format on one rank."""
    cell = dict(formats=["nvfp4-modelopt"], engines=["tp1"], dtype="float32", fault=None)
    how = dict(work=tmp_path, json=None, serve_args=[], fp8_activations=False)
    (row,) = accuracy.run(argparse.Namespace(**cell, **how))
    assert row.get("error") is None and row["misses"] == []


def test_faults_name_cells_of_the_matrix():
    assert {cell for _, *cells in FAULTS.values() for cell in cells} <= {*accuracy.FORMATS, *accuracy.ENGINES}
