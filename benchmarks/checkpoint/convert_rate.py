#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""How fast does `vllm checkpoint convert` write, beside a plain copy of the same folder on the same disk?

Makes an MXFP4 checkpoint with a few of Kimi K3's layers at full width, and fewer experts, whose data are random and do
take disk. Programs take turns, each with the source out of the page cache as far as the kernel allows; the result is
synced before the clock stops. Rates are bytes *written* per second.

    python benchmarks/checkpoint/convert_rate.py --folder /some/disk --json benchmarks/results/checkpoint_convert.json
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

import numpy as np

from vllm.checkpoint import tiny
from vllm.checkpoint.headers import read_headers

CONVERT = """
import json, re, sys, time
from pathlib import Path
from vllm.checkpoint.convert import convert
from vllm.checkpoint.headers import read_headers
source, out, to, attention = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
def peak():  # ru_maxrss would start with that of the parent
    return int(re.search(r"VmHWM:\\s*(\\d+) kB", Path("/proc/self/status").read_text())[1]) >> 10
before = peak()
start, cpu = time.monotonic(), time.process_time()
convert(source, out, to, attention)
print(json.dumps({
    "seconds": time.monotonic() - start,
    "cpu_s": time.process_time() - cpu,
    "grown_mib": peak() - before,
}))
"""
CASES = (
    ("MXFP4 to NVFP4, ModelOpt", "nvfp4-modelopt", "keep"),
    ("MXFP4 to NVFP4, FP8 attention", "nvfp4-ct", "fp8-pb-wo"),
    ("MXFP4 to BF16", "bf16", "bf16"),
)


def make_source(out: Path, experts: int) -> None:
    """Random codes; scales of e8m0 around one; BF16 of ordinary size."""
    from synthetic import K3, write

    shape = tiny.TinyShape(**{**K3.__dict__, "layers": "KM", "experts": experts, "vocab": 16384})
    write(out, "mxfp4", 4, shape)
    random = np.random.default_rng(0)
    for name, entry in read_headers(out).items():
        with open(out / entry.file, "r+b") as file:
            file.seek(entry.start)
            left = entry.nbytes
            while left:
                size = min(left, 64 << 20)
                if entry.dtype == "BF16":
                    values = random.standard_normal(size // 2, dtype=np.float32) * 0.02
                    data = (values.view(np.uint32) >> 16).astype(np.uint16).tobytes()
                elif name.endswith("weight_scale"):
                    data = random.integers(112, 124, size, dtype=np.uint8).tobytes()
                elif entry.dtype == "U8":
                    data = random.bytes(size)
                else:
                    data = bytes(size)
                file.write(data)
                left -= size


def uncached(folder: Path) -> None:
    """Write back, and let the kernel drop, the pages of a folder's files."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def copy(source: Path, out: Path) -> dict[str, float]:
    """What ``cp -r`` does, and a sync."""
    start = time.monotonic()
    shutil.copytree(source, out)
    for path in out.iterdir():
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return {"seconds": time.monotonic() - start}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--experts", type=int, default=96)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as parent:
        source, out = Path(parent) / "in", Path(parent) / "out"
        make_source(source, options.experts)
        largest = max(entry.nbytes for entry in read_headers(source).values())
        runs: dict[str, list[dict[str, float]]] = {}
        for _ in range(options.repeat):
            for name, to, attention in (("copy", "", ""), *CASES):
                uncached(source)
                if name == "copy":
                    run = copy(source, out)
                else:
                    command = [sys.executable, "-c", CONVERT, str(source), str(out), to, attention]
                    done = subprocess.run(command, capture_output=True, text=True)
                    if done.returncode:
                        raise SystemExit(done.stderr)
                    run = json.loads(done.stdout.splitlines()[-1])
                run["gib"] = size_of(out) / 2**30
                run["gib_per_s"] = run["gib"] / run["seconds"]
                runs.setdefault(name, []).append({key: round(value, 3) for key, value in run.items()})
                shutil.rmtree(out)
        result = {
            "source": {"gib": round(size_of(source) / 2**30, 2), "largest_tensor_mib": largest >> 20},
            "host": {"cpus": os.cpu_count(), "machine": platform.machine(), "python": platform.python_version()},
            "versions": {name: version(name) for name in ("vllm", "torch", "compressed-tensors")},
            "load_average": round(os.getloadavg()[0], 1),
            "best": {name: max(found, key=lambda run: run["gib_per_s"]) for name, found in runs.items()},
            "runs": runs,
        }
    for name, best in result["best"].items():
        print(f"{name:32} {best['gib']:6.2f} GiB {best['seconds']:7.2f} s {best['gib_per_s']:6.2f} GiB/s")
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
