"""What setup.py installs: a plain path entry when editable, a complete wheel otherwise."""

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fork.conftest import PLAIN
from tools.fork.base import ROOT, Fork

OURS = {"vllm/new/deep.py": "VALUE = 1\n", "vllm/new/template.jinja": "{{ x }}\n", "vllm/new/plain/deeper.py": ""}


@pytest.fixture
def build(make_fork: Callable, tmp_path: Path) -> Callable[[str], tuple[Fork, zipfile.ZipFile]]:
    """Calls a hook of the build backend, as pip does, on a miniature fork with this repository's own set-up."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    fork = make_fork(OURS)
    settings = (fork.root / "pyproject.toml").read_text()
    project = (ROOT / "pyproject.toml").read_text().partition("[tool.")[0]
    (fork.root / "pyproject.toml").write_text(project + settings)
    for name in ("tools", "requirements"):
        shutil.copytree(ROOT / name, fork.root / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("setup.py", "LICENSE", "README.md"):
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, fork.root)

    def run(hook: str) -> tuple[Fork, zipfile.ZipFile]:
        code = f"from setuptools import build_meta; build_meta.{hook}({str(tmp_path)!r})"
        environment = {**os.environ, "VLLM_TARGET_DEVICE": "cpu"}
        done = subprocess.run([sys.executable, "-c", code], cwd=fork.root, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return fork, zipfile.ZipFile(next(tmp_path.glob("*.whl")))

    return run


def test_an_editable_install_is_one_path_entry(build: Callable) -> None:
    fork, wheel = build("build_editable")
    outside = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert outside == {"__editable__.vllm-1.0+k3.1.cpu.pth"}
    assert wheel.read(outside.pop()).decode().strip() == str(fork.composed)


def test_a_wheel_holds_the_whole_tree_and_says_what_it_is(build: Callable) -> None:
    _, wheel = build("build_wheel")
    assert {name for name in wheel.namelist() if ".dist-info/" not in name} == {*PLAIN, *OURS}
    info = "vllm-1.0+k3.1.cpu.dist-info"
    lines = wheel.read(f"{info}/METADATA").decode().splitlines()
    assert "Name: vllm" in lines and "Version: 1.0+k3.1.cpu" in lines
    assert "Requires-Dist: torch==2.13.0" in lines and "Requires-Dist: msgspec" in lines
    assert "Provides-Extra: quantize" in lines
    assert "vllm = vllm.entrypoints.cli.main:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert "lora_filesystem_resolver" in wheel.read(f"{info}/entry_points.txt").decode()
    assert "Tag: cp311-abi3-" in wheel.read(f"{info}/WHEEL").decode()


def test_a_finding_stops_the_build_with_its_message_alone(build: Callable, tmp_path: Path) -> None:
    place = tmp_path / "checkout/vllm/calc.py"
    place.write_text("def area(): ...\n")
    with pytest.raises(AssertionError) as caught:
        build("build_wheel")
    assert "vllm/calc.py:1: EXISTS" in str(caught.value) and "Traceback" not in str(caught.value)
