"""The composed tree as Python sees it: each module that we amend imports by itself, from where sync wrote it."""

import re
import subprocess
import sys
from pathlib import Path

from tools.fork.base import Fork
from tools.fork.tree import our_files, where

# A fresh interpreter that is asked for a.b.c imports a, then a.b, then a.b.c. So does a process here, except that those
# of a.b.c and a.b.d are forked from one that has imported a.b. Packages besides vllm, which one child tells, are loaded
# first.
CODE = """
import gc, importlib, json, multiprocessing, os, sys

gc.disable()  # importing makes no garbage to speak of

# Upstream's own file imports itself in a circle, unless its importer comes first.
FIRST = {"vllm.transformers_utils.model_arch_config_convertor": ["vllm.config"]}
found, *names = sys.argv[1:]
turn = multiprocessing.Semaphore(len(os.sched_getaffinity(0)))

def visit(name):
    if os.fork():
        return
    with turn:
        for module in [*FIRST.get(name, []), name]:
            here = importlib.import_module(module)
    if name in names:
        os.write(1, f"{name} {here.__file__}\\n".encode())  # whole, beside other processes
    below = {n.removeprefix(name + ".").partition(".")[0] for n in names if n.startswith(name + ".")}
    for part in below:
        visit(f"{name}.{part}")
    for part in below:
        os.wait()
    os._exit(0)

if not os.fork():
    importlib.import_module(names[0])
    with open(found, "w") as out:
        json.dump([n for n in sys.modules if not n.startswith(("vllm", "__"))], out)
    os._exit(0)
os.wait()
for name in json.load(open(found)):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
visit("vllm")
os.wait()
"""


def test_each_amended_module_imports_in_an_interpreter_without_vllm(tmp_path: Path) -> None:
    fork = Fork()
    base = fork.base()
    paths = [path for path in our_files(fork.root) if path.endswith(".py") and (base / path).exists()]
    names = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in paths]
    command = [sys.executable, "-c", CODE, str(tmp_path / "loaded"), *names]
    done = subprocess.run(command, capture_output=True, text=True)
    found = dict(line.split() for line in done.stdout.splitlines() if line.startswith("vllm."))
    assert found == {name: str(fork.composed / path) for name, path in zip(names, paths)}, done.stderr


WORKER = """
import multiprocessing, sys

def work():
    from types import SimpleNamespace
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    # A layer whose attribute lookup fails inside our line of that function.
    dispatch_cpu_unquantized_gemm(type("Layer", (), {"__getattr__": lambda self, name: 1 / 0})(), True)

if __name__ == "__main__":
    process = multiprocessing.get_context("spawn").Process(target=work)
    process.start()
    process.join()
    sys.exit(process.exitcode)
"""


def test_a_spawned_workers_traceback_shows_our_line_and_maps_back(tmp_path: Path) -> None:
    """Upstream's file runs with our lines in it, wherever it is imported, and `where` finds them again."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert done.returncode == 1 and "ZeroDivisionError" in done.stderr
    fork = Fork()
    composed = fork.composed / "vllm/model_executor/layers/utils.py"
    frame = rf'File "{re.escape(str(composed))}", line (\d+), in dispatch_cpu_unquantized_gemm'
    frames = re.findall(frame, done.stderr)
    assert len(frames) == 1
    assert 'if getattr(layer, "reads_weight_directly", False):' in done.stderr
    place = where(fork, "vllm/model_executor/layers/utils.py", int(frames[0]))
    path, _, line = place.partition(":")
    text = (fork.root / path).read_text().splitlines()[int(line.split()[0]) - 1]
    assert "reads_weight_directly" in text
