# SPDX-License-Identifier: Apache-2.0
"""The trained tiny model, its training form, and one cell of the gate."""

import argparse
import random
import re

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.accuracy.train_tiny import SHAPE, Trainable, exact_match, fresh
from benchmarks.exactness.engine_logprobs import statistics
from tests.accuracy.faults import FAULTS
from tests.accuracy.texts import text
from tests.models.kimi_k3 import reference
from tools import accuracy
from vllm.checkpoint.tiny import text_config

pytest.importorskip("lm_eval", reason="judges the served model: pip install 'vllm[accuracy]'")
pytest.importorskip("modelopt", reason="writes a quantised checkpoint: pip install 'vllm[quantize]'")


CONFIG = text_config(SHAPE)


@pytest.fixture(scope="module")
def weights():
    """The stored model, BF16 values in float32."""
    return {name: values.float() for name, values in load_file(accuracy.TRAINED / "weights.safetensors").items()}


def scores(weights) -> dict[str, float]:
    return exact_match(Trainable(CONFIG, weights), 16, 304, 5)


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


@pytest.mark.parametrize("part", ["layers.0.self_attn.o_proj", "routed_expert_up_proj", "self_attn.g_proj"])
def test_answers_need_kda_the_routed_experts_and_the_output_gates(weights, part):
    assert accuracy.mean(scores(without(weights, part))) < accuracy.mean(scores(weights)) - 0.1


@pytest.mark.parametrize("part", ["1.self_attn.o_proj", "2.self_attn.o_proj", "2.self_attn.g_proj", ".down_proj"])
def test_log_probs_need_every_other_part(weights, part):
    """What no answer depends on still shows, far above the bound."""
    tokens = list(text(random.Random(0), 130)[0].encode())
    whole, less = (reference.Model(CONFIG, w).logprobs(tokens) for w in (weights, without(weights, part)))
    assert statistics(less, whole)["mean_kl"] > 1000 * accuracy.BOUNDS["float32"].divergence


def good(dtype: str) -> dict:
    scores = {"recall": 1.0, "addition": 1.0, "sorting": 1.0}
    side = {"mean_kl": 0.0, "mean_abs": 0.0, "argmax_agrees": 1.0}
    row = {"format": "bf16", "dtype": dtype, "exact_match": scores, "reference_exact_match": scores}
    return row | {"own": side, "bf16": side}


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


def test_tables_go_between_their_marks(tmp_path):
    page = tmp_path / "page.md"
    marks = [f"<!-- {end}{kind} float32 -->\n" for kind in ("matrix", "faults") for end in ("", "end of ")]
    page.write_text("before\n" + marks[0] + "old\n" + marks[1] + "between\n" + marks[2] + marks[3] + "after\n")
    healthy = good("float32") | {"engine": "tp1", "fault": None}
    faulty = healthy | {"fault": "gate_up_swapped", "exact_match": {"recall": 0.5}}
    accuracy.document(page, [healthy, faulty, healthy | {"error": "no server"}])
    before, matrix, between, faults, after = re.split(r"<!-- .* -->\n", page.read_text())
    assert (before, between, after) == ("before\n", "between\n", "after\n")
    assert "old" not in matrix and [line.count("|") for line in matrix.splitlines()] == [len(accuracy.COLUMNS) + 1] * 4
    assert "gate up swapped | bf16 | tp1 | float32 | 0.500 | 1.000" in faults and "| yes |" in faults


def test_one_cell_is_within_its_bounds(tmp_path):
    """A server, lm-eval and log-probs: the published format on one rank."""
    cell = dict(formats=["nvfp4-modelopt"], engines=["tp1"], dtype="float32", fault=None)
    (row,) = accuracy.run(argparse.Namespace(**cell, work=tmp_path, json=None))
    assert row.get("error") is None and row["misses"] == []


def test_faults_name_cells_of_the_matrix():
    assert {cell for _, *cells in FAULTS.values() for cell in cells} <= {*accuracy.FORMATS, *accuracy.ENGINES}
