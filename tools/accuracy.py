"""The accuracy gate: a tiny Kimi K3 that was trained for it, in each format, served, and asked what it knows.

Run by `make accuracy`, inside `.venv`; any other Python that can import `vllm` and `lm_eval` serves as well. Each cell
of the matrix is a format and a way to split it over ranks. Its server (`vllm serve`) answers lm-eval's tasks
(`tests/accuracy/tasks`) and a few longer texts with the log-probs of the whole vocabulary. Three comparisons, each with
a bound:

- with the format's own reference, the file dequantised in float32: what the engine does wrong;
- with the BF16 model's reference: that, and what quantisation costs;
- exact match, with what the own reference gets right of the same documents.

Exits 1 if a bound is missed. `--fault` plants a fault of `tests/accuracy/faults.py` in the engine: the gate must fail.
"""

import argparse
import hashlib
import json
import os
import shlex
import signal
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.demo import Failed, Server, claim_port, interrupt, token_id  # noqa: E402
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
CONCURRENT = 16  # requests at a time; more slots for them would only lengthen the start
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
        systematic: The systematic part of Δ log-prob (`tools/systematic.py`), root mean square. Rounding averages out
            of it. None: not asked for.
        settled: Positions where logits of two experts are nearer to a tie than this are left out of all but exact
            match.
    """

    divergence: float
    delta: float
    top1: float
    exact_match: float
    systematic: float | None = None
    settled: float = 0.0


# Healthy engines measured, at worst: float32 KL 4.0e-9, Δ 2.9e-6, top-1 1; bfloat16 KL 2.9e-5, Δ 2.1e-2, top-1 0.946,
# systematic 8.7e-3.
BOUNDS = {
    "float32": Bound(2e-8, 2e-5, 0.999, 0.0),
    "bfloat16": Bound(8e-5, 3.2e-2, 0.92, 0.05, systematic=1.2e-2, settled=0.12),
}
# Where kernels round the inputs of FP8 linears too. An H200: KL 5.4e-5, Δ 4.6e-2, systematic 2.5e-2 to a reference that
# also rounds them. (It does not round them in steps of few tokens, which is what remains.)
FP8_ACTIVATIONS = Bound(2e-4, 8e-2, 0.92, 0.05, systematic=4.5e-2, settled=0.12)
# Mean KL(BF16 model ‖ engine): at least twice what was measured, the dtype's own bound on top.
COST = {"bf16": 0.0, "nvfp4-modelopt": 1e-3, "nvfp4-ct": 1e-4, "mxfp4": 1e-4, "fp8-block-ct": 1e-3}
KNOWS = 0.95  # exact match of the BF16 model in each task


def bound_of(dtype: str, fp8_activations: bool) -> Bound:
    return FP8_ACTIVATIONS if fp8_activations else BOUNDS[dtype]


def write(format: str, folder: Path) -> Path:
    """The trained weights as a checkpoint of `format`, unless it is there already; returns its path.

    What was written, from what and by what code is stamped beside it. A machine without nvidia-modelopt can so use
    checkpoints of another one.
    """
    from safetensors.torch import load_file

    from vllm.checkpoint import tiny

    path, stamp = folder / format, folder / f"{format}.written"
    total = hashlib.sha256(repr(FORMATS[format]).encode())
    model = TRAINED / "weights.safetensors", TRAINED / "provenance.json"
    for file in (*model, *sorted(Path(tiny.__file__).parent.glob("*.py"))):
        total.update(file.read_bytes())
    if path.exists() and stamp.exists() and stamp.read_text() == total.hexdigest():
        return path
    weights, shape = load_file(model[0]), tiny.TinyShape(**json.loads(model[1].read_text())["shape"])
    tiny.make_tiny(path, format=format, shape=shape, weights=weights, force=True, **FORMATS[format])
    stamp.write_text(total.hexdigest())
    return path


class Truth:
    """A checkpoint of one format and what the reference makes of it.

    Args:
        format: One of `FORMATS`.
        folder: Where it is, or gets written.
        fp8_activations: Round the inputs of FP8 linears, as GPU kernels do (`reference.Model`).
    """

    def __init__(self, format: str, folder: Path, fp8_activations: bool):
        import torch

        from tests.models.kimi_k3 import reference
        from tools.systematic import Watched

        torch.set_num_threads(1)  # the reference's many small operations only lose by more
        self.path = write(format, folder)
        loaded = reference.load(self.path, fp8_activations=fp8_activations)
        self.model = Watched(loaded.config, loaded.weights, loaded.quantised, fp8_activations)
        self.fp8_activations = fp8_activations and bool(self.model.quantised)

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

    @cached_property
    def directions(self) -> Any:
        """Those of `tools/systematic.py` at each token of the longer texts."""
        from tools.systematic import directions

        return directions(self.model, texts())


def texts() -> list[list[int]]:
    """Token ids of the longer texts."""
    import random

    from tests.accuracy.texts import text

    return [list(text(random.Random(length), length)[0].encode()) for length in LENGTHS]


def ask(url: str, request: dict[str, Any]) -> dict[str, Any]:
    body = json.dumps(request).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=600
    ) as reply:
        return json.load(reply)


def answers(url: str, model: Path, vocab: int) -> list[tuple[list[int], Any]]:
    """Token ids of each longer text and its continuation, and log-probs [tokens, vocab] from the second token on."""
    import torch

    prompts = texts()

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
            "num_concurrent": CONCURRENT,
        },
        tasks=[f"kimi_k3_{task}" for task in NAMES],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
        log_samples=False,
    )
    return {task: float(found["results"][f"kimi_k3_{task}"]["exact_match,none"]) for task in NAMES}


class Cell:
    """A format, a way to split it, maybe a fault, and the server that shows it.

    Starting takes most of the time, and one core. So a cell is started while the one before answers, and the reference
    answers while a server starts.
    """

    def __init__(self, format: str, engine: str, dtype: str, fault: str | None):
        self.format, self.engine, self.dtype, self.fault = format, engine, dtype, fault
        self.server: Server | None = None

    def start(self, checkpoint: Path, serve_args: list[str]) -> None:
        """Start the server and return at once; a second call does nothing."""
        if self.server:
            return
        port = claim_port(0)
        # As a module: an environment that is only a path on PYTHONPATH has no `vllm` command.
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(checkpoint), "--dtype", self.dtype]
        command += ["--host", "127.0.0.1", "--port", str(port), "--max-logprobs", "-1"]
        # Few blocks, so that each is used again and what was left in it would show.
        command += ["--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "1024"]
        command += ["--max-num-seqs", str(CONCURRENT), *ENGINES[self.engine], *serve_args]
        variables = {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
        if self.fault:
            command += ["--worker-extension-cls", "tests.accuracy.faults.Planted"]
            variables["PLANTED_FAULT"] = self.fault
        name = "-".join(filter(None, (self.format, self.engine, self.dtype, self.fault)))
        self.server = Server(command, checkpoint.with_name(f"{name}.log"), variables)
        self.url = f"http://127.0.0.1:{port}"

    def wait(self) -> None:
        """Return once the server answers.

        Raises:
            Failed: It ended, or does not answer within ten minutes.
        """
        assert self.server
        progress = Progress(f"{self.format} {self.engine}")
        self.server.wait_for(f"{self.url}/health", 600, progress)
        progress.clear()

    def stop(self) -> None:
        """End the server, if there is one.

        Raises:
            Failed: Something had to be killed.
        """
        server, self.server = self.server, None
        if server:
            server.stop()


def compare(
    served: list[tuple[list[int], Any]], truth: Truth, bf16: Truth, bound: Bound
) -> dict[str, dict[str, float]]:
    """Statistics of what `answers` returned to the own reference and to the BF16 model's."""
    import torch

    from benchmarks.exactness.engine_logprobs import statistics
    from tools.systematic import systematic

    got = torch.cat([rows for _, rows in served])
    found = [truth.model.watched(ids[:-1]) for ids, _ in served]
    want, settled = torch.cat([rows for rows, _ in found]), torch.cat([margin for _, margin in found]) >= bound.settled
    own = statistics(got[settled], want[settled])
    if bound.systematic is not None:
        lengths = [(len(rows), len(text)) for (_, rows), text in zip(served, texts(), strict=True)]
        asked = torch.cat([torch.arange(rows) < prompt for rows, prompt in lengths])  # not the continuations
        along = bf16.directions[:, settled[asked]]
        own["systematic"] = systematic((got - want)[settled & asked], along)
    base = torch.cat([bf16.model.watched(ids[:-1])[0] for ids, _ in served])
    return {"own": own, "bf16": statistics(got[settled], base[settled])}


def mean(scores: dict[str, float]) -> float:
    return sum(scores.values()) / len(scores)


def misses(row: dict[str, Any]) -> list[str]:
    """The bounds that a cell missed, in words with both numbers; NaN misses all."""
    bound, found = bound_of(row["dtype"], row["fp8_activations"]), []
    if not abs(row["own"]["mean_kl"]) <= bound.divergence:
        found.append(f"KL to its own reference {row['own']['mean_kl']:.1e} > {bound.divergence:.0e}")
    if not row["own"]["mean_abs"] <= bound.delta:
        found.append(f"mean |Δ log-prob| {row['own']['mean_abs']:.1e} > {bound.delta:.0e}")
    if bound.systematic is not None and not row["own"]["systematic"] <= bound.systematic:
        found.append(f"systematic part {row['own']['systematic']:.1e} > {bound.systematic:.0e}")
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


def own(row: dict[str, Any], key: str, form: str) -> str:
    return format(row["own"][key], form) if key in row["own"] else "–"


# Heading -> a row's text.
COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "format": lambda row: row["format"],
    "engine": lambda row: row["engine"],
    "exact match": lambda row: f"{mean(row['exact_match']):.3f}",
    "reference": lambda row: f"{mean(row['reference_exact_match']):.3f}",
    "KL own": lambda row: own(row, "mean_kl", ".1e"),
    "Δ own": lambda row: own(row, "mean_abs", ".1e"),
    "systematic": lambda row: own(row, "systematic", ".1e"),
    "top-1 own": lambda row: own(row, "argmax_agrees", ".3f"),
    "KL BF16": lambda row: f"{row['bf16']['mean_kl']:.1e}",
    "top-1 BF16": lambda row: f"{row['bf16']['argmax_agrees']:.3f}",
}
SUMMARY = {name: COLUMNS[name] for name in ("format", "engine", "exact match", "reference", "KL own", "KL BF16")}
SEEN = 0.03  # a drop of the overall exact match that a benchmark of some thousand questions would notice


def margins(row: dict[str, Any]) -> dict[str, float]:
    """How many times its bound each statistic is."""
    bound = bound_of(row["dtype"], row["fp8_activations"])
    found = {"KL": row["own"]["mean_kl"] / bound.divergence, "Δ": row["own"]["mean_abs"] / bound.delta}
    if bound.systematic is not None:
        found["systematic"] = row["own"]["systematic"] / bound.systematic
    return found


def seen(row: dict[str, Any]) -> str:
    lost = mean(row["reference_exact_match"]) - mean(row["exact_match"])
    return "yes" if lost > SEEN else "**no**"


FAULT_COLUMNS: dict[str, Callable[[dict[str, Any]], str]] = {
    "fault": lambda row: row["fault"].replace("_", " "),
    **{name: text for name, text in COLUMNS.items() if "BF16" not in name},
    "times the bound": lambda row: ", ".join(f"{name} {times:.2g}" for name, times in margins(row).items()),
    "noticed": lambda row: "yes" if row["misses"] else "**no**",
    "seen by exact match alone": seen,
}


def table(columns: dict[str, Callable[[dict[str, Any]], str]], rows: list[dict[str, Any]]) -> list[list[str]]:
    """Text of each row under each heading; a row with an error has it in the first column that cannot be filled."""
    lines = []
    for row in rows:
        line = []
        for text in columns.values():
            try:
                line.append(text(row))
            except KeyError:
                line.append(row["error"] if row["error"] not in line else "")
        lines.append(line)
    return lines


def show(rows: list[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    shown = Table(*COLUMNS, "dtype", "fault", "verdict")
    for row, line in zip(rows, table(COLUMNS, rows), strict=True):
        style = "red" if row["misses"] else None
        shown.add_row(*line, row["dtype"], row["fault"] or "", "; ".join(row["misses"]) or "ok", style=style)
    Console(width=None if sys.stdout.isatty() else 240).print(shown)


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """For each format the row with the largest KL to its own reference, its engines put together."""
    found = []
    for name in FORMATS:
        mine = [row for row in rows if row["format"] == name and "error" not in row]
        if mine:
            worst = max(mine, key=lambda row: abs(row["own"]["mean_kl"]))
            found.append({**worst, "engine": ", ".join(row["engine"] for row in mine)})
    return found


def document(path: Path, rows: list[dict[str, Any]]) -> None:
    """Put the rows between the marks of a Markdown file: `<!-- matrix float32 cpu -->` and so on.

    There are marks for the healthy cells (matrix), the worst of each format (summary) and those with a fault (faults),
    each by dtype and device.
    """
    page = path.read_text()
    for dtype, device in dict.fromkeys((row["dtype"], row["device"]) for row in rows):
        mine = [row for row in rows if (row["dtype"], row["device"]) == (dtype, device)]
        healthy, faulty = ([row for row in mine if bool(row["fault"]) is wanted] for wanted in (False, True))
        for mark, columns, chosen in (
            ("matrix", COLUMNS, healthy),
            ("summary", SUMMARY, summary(healthy)),
            ("faults", FAULT_COLUMNS, faulty),
        ):
            begin, end = f"<!-- {mark} {dtype} {device} -->\n", f"<!-- end of {mark} {dtype} {device} -->"
            if chosen and begin in page:
                lines = [list(columns), ["---"] * len(columns), *table(columns, chosen)]
                text = "".join("| " + " | ".join(line) + " |\n" for line in lines)
                page = page.partition(begin)[0] + begin + text + end + page.partition(end)[2]
    path.write_text(page)


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    from benchmarks.kernels.measure import versions
    from tests.accuracy.faults import FAULTS

    options.work.mkdir(parents=True, exist_ok=True)
    plan = [Cell(format, engine, options.dtype, None) for format in options.formats for engine in options.engines]
    if options.fault:
        names = list(FAULTS) if "all" in options.fault else options.fault
        plan = [Cell(*FAULTS[name][1:], options.dtype, name) for name in names]
    bf16 = Truth("bf16", options.work, False)
    truths = {"bf16": bf16}

    def start(cell: Cell) -> Truth:
        if cell.format not in truths:
            truths[cell.format] = Truth(cell.format, options.work, options.fp8_activations)
        cell.start(truths[cell.format].path, options.serve_args)
        return truths[cell.format]

    about = versions()
    rows: list[dict[str, Any]] = []
    begin = time.monotonic()
    for cell, following in zip(plan, [*plan[1:], None], strict=True):
        row: dict[str, Any] = {"device": about["device"], "format": cell.format, "engine": cell.engine}
        row |= {"dtype": cell.dtype, "fault": cell.fault}
        try:
            truth = start(cell)
            row["fp8_activations"] = truth.fp8_activations
            row["reference_exact_match"] = truth.exact_match
            cell.wait()
            if following:
                with suppress(Exception):  # it says so in its own row
                    start(following)
            row["exact_match"] = lm_eval_scores(f"{cell.url}/v1", truth.path)
            served = answers(f"{cell.url}/v1", truth.path, truth.model.config["vocab_size"])
            cell.stop()
            row |= compare(served, truth, bf16, bound_of(cell.dtype, truth.fp8_activations))
            row["misses"] = misses(row)
        except Exception as error:  # a cell that cannot be measured has failed; the others go on
            row |= {"error": f"{type(error).__name__}: {error}"[:200]}
        except BaseException:
            if following:
                with suppress(Failed):
                    following.stop()
            raise
        finally:
            with suppress(Failed):  # what went wrong first is what matters, an interruption above all
                cell.stop()
        row["seconds"] = round(time.monotonic() - begin, 1)
        begin = time.monotonic()
        rows.append(row)
        note = row.get("error") or "; ".join(row["misses"]) or "ok"
        print(f"{cell.format} {cell.engine} {cell.dtype} {cell.fault or ''} {row['seconds']} s: {note}", flush=True)
        if options.json:  # after each, so that a run cut short keeps what it has
            keep(options.json, about, row)
    return rows


def keep(path: Path, about: dict[str, str], row: dict[str, Any]) -> None:
    """Put a row into a JSON file in place of an earlier one of the same cell."""

    def cell(row: dict[str, Any]) -> list[Any]:
        return [row[key] for key in ("device", "format", "engine", "dtype", "fault")]

    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = [old for old in rows if cell(old) != cell(row)] + [row]
    path.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--formats", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    device = "bfloat16" if Fork().flavour == "cuda" else "float32"
    parser.add_argument("--dtype", choices=BOUNDS, default=device, help="compute dtype (default here: %(default)s)")
    parser.add_argument("--serve-args", type=shlex.split, default=[], metavar="'…'", help="more for vllm serve")
    parser.add_argument(
        "--fp8-activations",
        action=argparse.BooleanOptionalAction,
        default=Fork().flavour == "cuda",
        help="whether kernels round the inputs of FP8 linears, and the reference with them (default here: %(default)s)",
    )
    parser.add_argument("--prepare", action="store_true", help="write the checkpoints into --work and do no more")
    parser.add_argument("--fault", nargs="+", metavar="NAME", help="plant these faults ('all'), each in its own cell")
    parser.add_argument("--work", type=Path, default=ROOT / ".accuracy", help="folder of checkpoints and servers' logs")
    parser.add_argument("--json", type=Path, help="put the rows there, each in place of an earlier one of its cell")
    parser.add_argument("--rows", nargs="+", type=Path, default=[], metavar="JSON", help="measure nothing, take these")
    parser.add_argument(
        "--document", nargs="+", type=Path, default=[], help="put the tables between the marks of these Markdown files"
    )
    options = parser.parse_args(arguments)
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    signal.signal(signal.SIGTERM, interrupt)
    if options.prepare:
        options.work.mkdir(parents=True, exist_ok=True)
        for format in {"bf16", *options.formats}:
            print(write(format, options.work))
        return 0
    rows = [row for path in options.rows for row in json.loads(path.read_text())["rows"]] or run(options)
    for row in rows:  # bounds may have changed since
        row["misses"] = [row["error"]] if "error" in row else misses(row)
    show(rows)
    for page in options.document:
        document(page, rows)
    return int(any(row["misses"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
