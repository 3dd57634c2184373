#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How long does inspecting a full-size Kimi K3 take, beside libraries that open every tensor?

Writes a sparse checkpoint (`synthetic.py`, no data on the disk) and runs each program in its own process: wall time,
processor time and the largest resident memory, best of several. ``import vllm`` alone is one of them, since every
`vllm` command pays for it.

    python benchmarks/checkpoint/inspect_speed.py --json benchmarks/results/checkpoint_inspect.json
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

INSPECT = ["-m", "vllm.entrypoints.cli.main", "checkpoint", "inspect", "{folder}", "--tp", "16", "--ep", "--json"]
SAFETENSORS = """
import sys, pathlib
from safetensors import safe_open
count = 0
for shard in sorted(pathlib.Path(sys.argv[1]).glob("*.safetensors")):
    with safe_open(shard, "pt") as file:
        for name in file.keys():
            part = file.get_slice(name)
            count += len(part.get_shape()) >= 0 and part.get_dtype() != ""
print(count)
"""
TRANSFORMERS = """
import sys, pathlib
from transformers.modeling_utils import load_state_dict
count = 0
for shard in sorted(pathlib.Path(sys.argv[1]).glob("*.safetensors")):
    count += len(load_state_dict(str(shard), map_location="meta"))
print(count)
"""
PROGRAMS = {
    "import vllm": ["-c", "import vllm"],
    "vllm checkpoint inspect": INSPECT,
    "safetensors, shape and dtype of every tensor": ["-c", SAFETENSORS, "{folder}"],
    "transformers, every tensor on the meta device": ["-c", TRANSFORMERS, "{folder}"],
}


def measure(arguments: list[str], folder: Path) -> dict[str, float]:
    command = [sys.executable, *(a.replace("{folder}", str(folder)) for a in arguments)]
    start = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{command[:4]}: exit status {child.returncode}")
    return {
        "wall_s": round(time.monotonic() - start, 2),
        "cpu_s": round(usage.ru_utime + usage.ru_stime, 2),
        "max_rss_mib": usage.ru_maxrss >> 10,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--format", choices=("mxfp4", "nvfp4-modelopt"), default="mxfp4")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "k3"
        script = Path(__file__).with_name("synthetic.py")
        made = subprocess.run(
            [sys.executable, script, folder, "--format", options.format], capture_output=True, text=True, check=True
        )
        result = {
            "checkpoint": {"format": options.format, **json.loads(made.stdout.splitlines()[-1])},
            "host": {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
            "versions": {name: version(name) for name in ("vllm", "safetensors", "transformers", "msgspec")},
            "load_average_before": round(os.getloadavg()[0], 1),
            "programs": {},
        }
        for name, arguments in PROGRAMS.items():
            runs = [measure(arguments, folder) for _ in range(options.repeat)]
            best = min(runs, key=lambda run: run["wall_s"])
            result["programs"][name] = {**best, "runs_wall_s": [run["wall_s"] for run in runs]}
            print(f"{name:48} {best['wall_s']:7.2f} s wall  {best['cpu_s']:7.2f} s CPU  {best['max_rss_mib']:6} MiB")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
