"""The accuracy gate: a tiny Kimi K3 that was trained for it, in each format, served, and asked what it knows.

Run by `make accuracy`, inside `.venv`. Each cell of the matrix is a format and a way to split it over ranks. Its server
(`vllm serve`) answers lm-eval's tasks (`tests/accuracy/tasks`) and a few longer texts with the log-probs of the whole
vocabulary. Three comparisons, each with a bound:

- with the format's own reference, the file dequantised in float32: what the engine does wrong;
- with the BF16 model's reference: that, and what quantisation costs;
- exact match, with what the own reference gets right of the same documents.

Exits 1 if a bound is missed. `--fault` plants a fault of `tests/accuracy/faults.py` in the engine: the gate must fail.
"""

import argparse
import json
import os
import signal
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.demo import VLLM, Failed, Server, claim_port, interrupt, token_id  # noqa: E402
from tools.fork.base import Fork  # noqa: E402
from tools.install import Progress  # noqa: E402

TRAINED = ROOT / "tests" / "accuracy" / "tiny-k3"
TASKS = ROOT / "tests" / "accuracy" / "tasks"

# Tensor scales of gate and up differ in one file, or no engine could show that it mixes them up.
FORMATS: dict[str, dict[str, Any]] = {
    "bf16": {},
    "nvfp4-modelopt": {},
    "nvfp4-ct": {"w3_scale_ratio": 4.0},
    "mxfp4": {},
    "fp8-block-ct": {},
}
ENGINES = {
    "tp1": [],
    "tp2": ["--tensor-parallel-size", "2"],
    "ep2": ["--tensor-parallel-size", "2", "--enable-expert-parallel"],
}
LENGTHS = (24, 63, 64, 100, 130, 180, 240, 290)  # characters of the longer texts; a dictionary has 34
NEW_TOKENS = 16


@dataclass(frozen=True)
class Bound:
    """Limits of one compute dtype.

    Attributes:
        divergence: Mean KL(own reference ‖ engine) over all positions, in nats.
        delta: Mean |Δ log-prob| to the own reference over all positions and the whole vocabulary. It weighs unlikely
            tokens as much as likely ones, and so shows faults that KL loses in the noise of bfloat16.
        top1: Share of positions where both find the same token most likely.
        exact_match: How far the share of right answers may be from the reference's.
    """

    divergence: float
    delta: float
    top1: float
    exact_match: float


# Healthy engines measured: float32 KL 2e-9, Δ 2.5e-6, top-1 1; bfloat16 KL 9e-5, Δ 2.3e-2, top-1 0.960.
BOUNDS = {"float32": Bound(1e-8, 2e-5, 0.999, 0.0), "bfloat16": Bound(3e-4, 4e-2, 0.94, 0.05)}
# Mean KL(BF16 model ‖ engine): at least twice what was measured, the dtype's own bound on top.
COST = {"bf16": 0.0, "nvfp4-modelopt": 1e-3, "nvfp4-ct": 1e-4, "mxfp4": 1.5e-4, "fp8-block-ct": 4e-4}
KNOWS = 0.95  # exact match of the BF16 model in each task


def write(format: str, folder: Path) -> Path:
    """The trained weights as a checkpoint of `format`; returns its path."""
    from safetensors.torch import load_file

    from vllm.checkpoint.tiny import TinyShape, make_tiny

    shape = TinyShape(**json.loads((TRAINED / "provenance.json").read_text())["shape"])
    weights = load_file(TRAINED / "weights.safetensors")
    make_tiny(folder / format, format=format, shape=shape, weights=weights, force=True, **FORMATS[format])
    return folder / format


class Truth:
    """A checkpoint of one format and what the reference makes of it."""

    def __init__(self, format: str, folder: Path):
        import torch

        from tests.models.kimi_k3 import reference

        torch.set_num_threads(1)  # the reference's many small operations only lose by more
        self.path = write(format, folder)
        self.model = reference.load(self.path)

    @cached_property
    def exact_match(self) -> dict[str, float]:
        """Share of documents by task whose whole answer is, token by token, the most likely one."""
        from tests.accuracy.tasks.documents import documents
        from tests.accuracy.texts import TASKS as NAMES

        scores = {}
        for task in NAMES:
            hits = []
            for document in documents(task)["test"]:
                answer = list((document["answer"] + ";").encode())
                ids = list(document["prompt"].encode()) + answer
                best = self.model.logprobs(ids[:-1]).argmax(-1)
                hits.append(best[-len(answer) :].tolist() == answer)
            scores[task] = sum(hits) / len(hits)
        return scores


def ask(url: str, request: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps(request).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=600
    ) as reply:
        return json.load(reply)


def answers(url: str, model: Path, vocab: int) -> list[tuple[list[int], Any]]:
    """Token ids of each longer text and its continuation, and log-probs [tokens, vocab] from the second token on."""
    import random

    import torch

    from tests.accuracy.texts import text

    prompts = [list(text(random.Random(length), length)[0].encode()) for length in LENGTHS]

    def one(prompt: list[int]) -> tuple[list[int], Any]:
        choice = ask(
            f"{url}/completions",
            {
                "model": str(model),
                "prompt": prompt,
                "max_tokens": NEW_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "logprobs": vocab,
                "prompt_logprobs": vocab,
                "return_token_ids": True,
                "return_tokens_as_token_ids": True,
            },
        )["choices"][0]
        rows = [{int(token): entry["logprob"] for token, entry in row.items()} for row in choice["prompt_logprobs"][1:]]
        rows += [{token_id(token): value for token, value in row.items()} for row in choice["logprobs"]["top_logprobs"]]
        return prompt + choice["token_ids"], torch.tensor([[row[token] for token in range(vocab)] for row in rows])

    with ThreadPoolExecutor(len(prompts)) as pool:
        return list(pool.map(one, prompts))


def lm_eval_scores(url: str, model: Path) -> dict[str, float]:
    """Exact match by task, asked and judged by lm-eval."""
    import logging

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    import lm_eval
    from lm_eval.tasks import TaskManager

    from tests.accuracy.texts import TASKS as NAMES

    found = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": str(model),
            "base_url": f"{url}/completions",
            "tokenizer_backend": "none",
            "num_concurrent": 16,
        },
        tasks=[f"kimi_k3_{task}" for task in NAMES],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
        log_samples=False,
    )
    return {task: float(found["results"][f"kimi_k3_{task}"]["exact_match,none"]) for task in NAMES}


def measure(truth: Truth, bf16: Truth, engine: str, dtype: str, fault: str | None) -> dict[str, Any]:
    """Serve one cell and compare.

    Raises:
        Failed: The server did not start, or not end.
    """
    import torch

    from benchmarks.exactness.engine_logprobs import statistics

    port = claim_port(0)
    command = [str(VLLM), "serve", str(truth.path), "--host", "127.0.0.1", "--port", str(port), "--dtype", dtype]
    # Few blocks, so that each is used again and what was left in it would show.
    command += ["--max-logprobs", "-1", "--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "1024"]
    command += ENGINES[engine]
    variables = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    if fault:
        command += ["--worker-extension-cls", "tests.accuracy.faults.Planted"]
        variables["PLANTED_FAULT"] = fault
    log = truth.path.with_name("-".join(filter(None, (truth.path.name, engine, dtype, fault))) + ".log")
    server = Server(command, log, variables)
    started = time.monotonic()
    try:
        url = f"http://127.0.0.1:{port}"
        progress = Progress(f"{truth.path.name} {engine}")
        server.wait_for(f"{url}/health", 600, progress)
        progress.clear()
        ready = time.monotonic()
        scores = lm_eval_scores(f"{url}/v1", truth.path)
        judged = time.monotonic()
        served = answers(f"{url}/v1", truth.path, truth.model.config["vocab_size"])
    except BaseException:
        with suppress(Failed):  # what went wrong first is what matters, an interruption above all
            server.stop()
        raise
    server.stop()
    got = torch.cat([rows for _, rows in served])
    own = statistics(got, torch.cat([truth.model.logprobs(ids[:-1]) for ids, _ in served]))
    base = statistics(got, torch.cat([bf16.model.logprobs(ids[:-1]) for ids, _ in served]))
    return {
        "exact_match": scores,
        "own": own,
        "bf16": base,
        "seconds": {
            "start": round(ready - started, 1),
            "lm-eval": round(judged - ready, 1),
            "all": round(time.monotonic() - started, 1),
        },
    }


def mean(scores: dict[str, float]) -> float:
    return sum(scores.values()) / len(scores)


def misses(row: dict[str, Any]) -> list[str]:
    """The bounds that a cell missed, in words with both numbers; NaN misses all."""
    bound, found = BOUNDS[row["dtype"]], []
    if not abs(row["own"]["mean_kl"]) <= bound.divergence:
        found.append(f"KL to its own reference {row['own']['mean_kl']:.1e} > {bound.divergence:.0e}")
    if not row["own"]["mean_abs"] <= bound.delta:
        found.append(f"mean |Δ log-prob| {row['own']['mean_abs']:.1e} > {bound.delta:.0e}")
    if not row["own"]["argmax_agrees"] >= bound.top1:
        found.append(f"top-1 {row['own']['argmax_agrees']:.3f} < {bound.top1}")
    cost = COST[row["format"]] + bound.divergence
    if not row["bf16"]["mean_kl"] <= cost:
        found.append(f"KL to the BF16 model {row['bf16']['mean_kl']:.1e} > {cost:.0e}")
    for task, score in row["exact_match"].items():
        wanted = row["reference_exact_match"][task]
        if not abs(score - wanted) <= bound.exact_match + 1e-9:
            found.append(f"{task} {score:.3f}, the reference {wanted:.3f}")
        if row["format"] == "bf16" and not score >= KNOWS:
            found.append(f"{task} {score:.3f} < {KNOWS}")
    return found


COLUMNS = (
    "format",
    "engine",
    "dtype",
    "exact match",
    "reference",
    "KL own",
    "Δ own",
    "top-1 own",
    "KL BF16",
    "top-1 BF16",
)
FAULT_COLUMNS = ("fault", *COLUMNS[:8], "KL / bound", "Δ / bound", "seen by exact match alone")
SEEN = 0.03  # a drop of the overall exact match that a benchmark of some thousand questions would notice


def cells(row: dict[str, Any]) -> list[str]:
    """A row as text under `COLUMNS`."""
    text = [row["format"], row["engine"], row["dtype"]]
    if "error" in row:
        return [*text, row["error"]] + [""] * (len(COLUMNS) - 4)
    text += [f"{mean(row[key]):.3f}" for key in ("exact_match", "reference_exact_match")]
    text += [f"{row['own']['mean_kl']:.1e}", f"{row['own']['mean_abs']:.1e}", f"{row['own']['argmax_agrees']:.3f}"]
    return [*text, f"{row['bf16']['mean_kl']:.1e}", f"{row['bf16']['argmax_agrees']:.3f}"]


def fault_cells(row: dict[str, Any]) -> list[str]:
    """A row with a fault as text under `FAULT_COLUMNS`."""
    text = [row["fault"].replace("_", " "), *cells(row)[:8]]
    if "error" in row:
        return [*text, "", "", "yes: no server"]
    seen = mean(row["reference_exact_match"]) - mean(row["exact_match"]) > SEEN
    bound = BOUNDS[row["dtype"]]
    margins = row["own"]["mean_kl"] / bound.divergence, row["own"]["mean_abs"] / bound.delta
    return [*text, *(f"{margin:.2g}" for margin in margins), "yes" if seen else "**no**"]


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*COLUMNS, "fault", "verdict")
    for row in rows:
        wrong = [row["error"]] if "error" in row else row["misses"]
        table.add_row(*cells(row), row["fault"] or "", "; ".join(wrong) or "ok", style="red" if wrong else None)
    Console(width=None if sys.stdout.isatty() else 240).print(table)


def document(path: Path, rows: list[dict[str, Any]]) -> None:
    """Put the rows between the marks of a Markdown file, those with faults between marks of their own."""
    page = path.read_text()
    for mark, columns, text, chosen in (
        ("matrix", COLUMNS, cells, [row for row in rows if not row["fault"]]),
        ("faults", FAULT_COLUMNS, fault_cells, [row for row in rows if row["fault"]]),
    ):
        mark += " " + rows[0]["dtype"]
        begin, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
        if chosen and begin in page:
            lines = ["| " + " | ".join(line) + " |" for line in (columns, ["---"] * len(columns), *map(text, chosen))]
            head, tail = page.partition(begin)[0], page.partition(end)[2]
            page = head + begin + "\n".join(lines) + "\n" + end + tail
    path.write_text(page)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    from tests.accuracy.faults import FAULTS

    options.work.mkdir(exist_ok=True)
    plan: list[tuple[str, str, str | None]] = [
        (format, engine, None) for format in options.formats for engine in options.engines
    ]
    if options.fault:
        names = list(FAULTS) if "all" in options.fault else options.fault
        plan = [(FAULTS[name][1], FAULTS[name][2], name) for name in names]
    bf16 = Truth("bf16", options.work)
    truths = {"bf16": bf16}
    rows: list[dict[str, Any]] = []
    for format, engine, fault in plan:
        if format not in truths:
            truths[format] = Truth(format, options.work)
        row: dict[str, Any] = {"format": format, "engine": engine, "dtype": options.dtype, "fault": fault}
        try:
            row |= {"reference_exact_match": truths[format].exact_match}
            row |= measure(truths[format], bf16, engine, options.dtype, fault)
            row["misses"] = misses(row)
        except Exception as error:  # a cell that cannot be measured has failed; the others go on
            row |= {"error": f"{type(error).__name__}: {error}"[:200]}
        rows.append(row)
        note = row.get("error") or "; ".join(row["misses"]) or "ok"
        print(f"{format} {engine} {options.dtype} {fault or ''} {row.get('seconds', {}).get('all', '')} s: {note}")
        sys.stdout.flush()
        if options.json:  # after each, so that a run cut short keeps what it has
            options.json.write_text(json.dumps({"vllm": version("vllm"), "rows": rows}, indent=1) + "\n")
    return rows


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    device = "bfloat16" if Fork().flavour == "cuda" else "float32"
    parser.add_argument("--dtype", choices=BOUNDS, default=device, help="compute dtype (default here: %(default)s)")
    parser.add_argument("--fault", nargs="+", metavar="NAME", help="plant these faults ('all'), each in its own cell")
    parser.add_argument("--work", type=Path, default=ROOT / ".accuracy", help="folder of checkpoints and servers' logs")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--document", type=Path, help="put the table between the marks of this file (docs/accuracy.md)")
    options = parser.parse_args(arguments)
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    signal.signal(signal.SIGTERM, interrupt)
    rows = run(options)
    show(rows)
    if options.document:
        document(options.document, rows)
    return int(any(row.get("error") or row["misses"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
