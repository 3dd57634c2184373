# SPDX-License-Identifier: Apache-2.0
"""The engine's log-probs on this machine's device against the float32 reference.

Method: for each format a tiny checkpoint (`vllm checkpoint make-tiny`, or one given by
``--checkpoint FORMAT=PATH``); each engine runs in a process of its own and answers
seeded prompts with log-probs of every vocabulary entry, for prompt tokens and for greedy
continuations. The reference (`tests/models/kimi_k3/reference.py`) reads the file itself,
dequantises it exactly and goes over the same tokens, teacher-forced, in float32. Reported
over all positions: max, mean and median |difference|, KL(reference ‖ engine), and how
often the most likely token agrees. BF16's own deviation is the yardstick. GPU kernels
round the inputs of FP8 linears to e4m3, so there ``rounding`` tells what that alone does:
the reference that rounds them against the one that does not. Seconds are those of the
engine's start, of its answers, and of the reference.

    python benchmarks/exactness/engine_logprobs.py --formats bf16 nvfp4-ct --json out.json
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

FORMATS = ("bf16", "nvfp4-modelopt", "nvfp4-ct", "mxfp4", "fp8-block-ct")
LENGTHS = (1, 2, 17, 63, 64, 65, 130, 200)
NEW_TOKENS = 16
KEPT = ("MoE backend", "NVFP4 experts", "Selected", "Using")  # log lines that say which kernels run


def run_engine(checkpoint: str, options: dict, threads: int) -> dict:
    """One engine, in this process: statistics over all positions.

    Args:
        threads: Of the reference, whose thousands of small operations gain nothing from more.
    """
    from tests.models.kimi_k3 import reference
    from vllm import LLM, SamplingParams

    seconds = {}

    def lap(name: str) -> None:
        """Since the last one; printed at once, so that the log of a run cut short says how far it came."""
        nonlocal started
        started, before = time.monotonic(), started
        seconds[name] = round(started - before, 1)
        print(f"{name} {seconds[name]}", flush=True)

    torch.set_num_threads(threads)
    started = time.monotonic()
    llm = LLM(checkpoint, max_model_len=1024, max_logprobs=-1, enable_prefix_caching=False, **options)
    lap("start_s")
    vocab = llm.llm_engine.model_config.get_vocab_size()
    rng = random.Random(7)
    prompts = [[rng.randrange(vocab - 20) for _ in range(n)] for n in LENGTHS]
    params = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=-1, prompt_logprobs=-1, detokenize=False
    )
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    lap("generate_s")
    truth = reference.load(checkpoint)
    got, want = [], []
    for prompt, output in zip(prompts, outputs):
        positions = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        got.append(torch.tensor([[p[token].logprob for token in range(vocab)] for p in positions]))
        want.append(truth.logprobs(prompt + list(output.outputs[0].token_ids)[:-1]))
    lap("reference_s")
    found = {**seconds, **statistics(torch.cat(got), torch.cat(want))}
    if torch.cuda.is_available() and truth.quantised:
        rounded = reference.load(checkpoint, fp8_activations=True)
        inputs = [p + list(o.outputs[0].token_ids)[:-1] for p, o in zip(prompts, outputs)]
        found["rounding"] = statistics(torch.cat([rounded.logprobs(x) for x in inputs]), torch.cat(want))
    return found


def statistics(got: torch.Tensor, want: torch.Tensor) -> dict:
    """Both ``[positions, vocab]`` log-probs."""
    if got.shape != want.shape or not got.isfinite().all():
        raise ValueError(f"log-probs {tuple(got.shape)} for {tuple(want.shape)}, or not finite")
    delta = (got.double() - want.double()).abs().flatten()
    want = want.double()
    divergence = (want.exp() * (want - got.double())).sum(-1)
    return {
        "positions": len(got),
        "max_abs": delta.max().item(),
        "mean_abs": delta.mean().item(),
        "median_abs": delta.median().item(),
        "mean_kl": divergence.mean().item(),
        "median_kl": divergence.median().item(),
        "argmax_agrees": (got.argmax(-1) == want.argmax(-1)).double().mean().item(),
    }


def run_apart(checkpoint: Path, options: dict, threads: int, log: Path) -> dict:
    """`run_engine` in a fresh process, which writes the log as it goes."""
    command = [sys.executable, "-u", __file__, "--one", str(checkpoint)]
    command += ["--options", json.dumps(options), "--threads", str(threads)]
    with log.open("w") as file:
        done = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT)
    lines = log.read_text(errors="replace").splitlines()
    if done.returncode:
        return {"error": next((x for x in reversed(lines) if "Error" in x), f"exit {done.returncode}")[-300:]}
    kernels = {x.split("] ", 1)[-1] for x in lines if any(k in x for k in KEPT) and "NFO" in x}
    return {**json.loads(lines[-1]), "log": sorted(kernels)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--formats", nargs="+", default=list(FORMATS), choices=FORMATS)
    parser.add_argument("--checkpoint", action="append", default=[], metavar="FORMAT=PATH", help="use this file")
    parser.add_argument("--modes", nargs="+", default=["eager", "graphs"], choices=["eager", "graphs"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine", default="{}", help="more options of the engine, as JSON")
    parser.add_argument("--threads", type=int, default=4, help="of the reference (default: %(default)s)")
    parser.add_argument("--logs", type=Path, help="folder for the engines' logs, written as they appear")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--options", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        print("\n" + json.dumps(run_engine(args.one, json.loads(args.options), args.threads)))
        return

    from benchmarks.kernels.measure import versions
    from vllm.checkpoint.tiny import make_tiny

    given = dict(entry.split("=", 1) for entry in args.checkpoint)
    work = Path(tempfile.mkdtemp())
    logs = args.logs or work
    logs.mkdir(parents=True, exist_ok=True)
    result: dict = {"method": __doc__, **versions(), "dtype": args.dtype, "rows": []}
    print("format          mode    start s  answers s  reference s  max      mean     median   mean KL  argmax")
    for name in args.formats:
        path = Path(given.get(name, work / name))
        if not path.exists():
            make_tiny(path, format=name, seed=3)
        for mode in args.modes:
            # Graph capture wants a cache block for each of the most requests at a time.
            options = {"dtype": args.dtype, "enforce_eager": mode == "eager", "max_num_seqs": 64}
            options["kv_cache_memory_bytes"] = 256 << 20
            row = run_apart(path, options | json.loads(args.engine), args.threads, logs / f"{name}-{mode}.log")
            result["rows"].append({"format": name, "mode": mode, **row})
            if "error" in row:
                print(f"{name:15} {mode:7} {row['error']}", flush=True)
            else:
                print(
                    f"{name:15} {mode:7} {row['start_s']:7.1f} {row['generate_s']:10.1f} {row['reference_s']:12.1f}  "
                    f"{row['max_abs']:.2e} {row['mean_abs']:.2e} {row['median_abs']:.2e} {row['mean_kl']:.2e} "
                    f"{row['argmax_agrees']:.3f}",
                    flush=True,
                )
            if args.json:  # after each, so that a run cut short keeps what it has
                args.json.write_text(json.dumps(result, indent=1))
    sys.exit(any("error" in row for row in result["rows"]))


if __name__ == "__main__":
    main()
