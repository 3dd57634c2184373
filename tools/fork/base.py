"""The released wheel that the fork stands on: found, verified, unpacked once, read-only."""

import base64
import csv
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.fork.parse import ForkError, Problem

ROOT = Path(__file__).resolve().parents[2]
FLAVOURS = ("cpu", "cuda")


class Fork:
    """A checkout of the fork: its settings and the places it uses.

    Attributes:
        root: The repository.
        flavour: `cpu` or `cuda`.
    """

    def __init__(self, root: Path = ROOT, flavour: str | None = None):
        self.root = root
        with open(root / "pyproject.toml", "rb") as file:
            self.settings = tomllib.load(file)["tool"]["fork"]
        self.flavour = flavour or choose_flavour()
        self.home = root / ".fork"
        self.composed = self.home / "composed"
        self.manifest = self.home / "manifest.json"

    @property
    def version(self) -> str:
        """The distribution's version; CPU builds say so, since platform detection reads it."""
        tail = ".cpu" if self.flavour == "cpu" else ""
        return f"{self.settings['base']}+{self.settings['release']}{tail}"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Holds the fork for one process; clears what a killed one left behind."""
        self.home.mkdir(exist_ok=True)
        with open(self.home / "lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            for rest in self.home.glob("tmp-*"):
                shutil.rmtree(rest)
            yield

    def base(self, version: str | None = None) -> Path:
        """The unpacked base, fetched on first use."""
        with self.lock():
            return self.fetch(version)

    def fetch(self, version: str | None = None) -> Path:
        """What `base` does; the caller holds the lock.

        Args:
            version: Another release than the pinned one, which has no known hash.

        Raises:
            ForkError: HASH when the wheel, or its Python files, are not the pinned ones.
        """
        pinned = version in (None, self.settings["base"])
        version = version or self.settings["base"]
        flavour = self.flavour if pinned else "cuda"
        where = self.home / "base" / f"{flavour}-{version}"
        if where.exists():
            return where
        name = self.settings[flavour]["distribution"]
        scratch = Path(tempfile.mkdtemp(prefix="tmp-", dir=self.home))
        try:
            wheel = find_wheel(name, version, scratch)
            seen = file_sha256(wheel)
            want = self.settings[flavour]["sha256"] if pinned else seen
            if seen != want:
                todo = "Delete that file and run `./fork sync` again; if it comes back, do not install it."
                raise ForkError(Problem(str(wheel), 1, "HASH", f"this is not the pinned {name} {version}",
                                        f"sha256 {seen}\npinned {want}", todo))
            unpack(wheel, scratch / "tree")
            if pinned and (common := self.python_digest(scratch / "tree")) != self.settings["python-digest"]:
                raise ForkError(Problem(str(wheel), 1, "HASH", "its Python files differ from upstream's release",
                                        f"digest {common}\npinned {self.settings['python-digest']}",
                                        "Use the wheel that pyproject.toml pins."))
            if not pinned:
                print(f"fork: {wheel.name} sha256 {seen} (not pinned)")
            where.parent.mkdir(exist_ok=True)
            (scratch / "tree").rename(where)
        finally:
            shutil.rmtree(scratch)
        return where

    def python_digest(self, tree: Path) -> str:
        """One digest over the Python files that all flavours share."""
        private = tuple(self.settings["not-shared"])
        rows = sorted(f"{path} {digest}\n" for path, digest in record(tree).items()
                      if path.endswith(".py") and not path.startswith(private))
        return hashlib.sha256("".join(rows).encode()).hexdigest()


def choose_flavour() -> str:
    """`VLLM_TARGET_DEVICE`, else cuda where an NVIDIA driver is visible, else cpu."""
    asked = os.environ.get("VLLM_TARGET_DEVICE", "")
    if asked and asked not in FLAVOURS:
        raise ForkError(Problem("VLLM_TARGET_DEVICE", 1, "FORM", f"{asked!r} is no flavour of the fork",
                                todo=f"Set it to one of: {', '.join(FLAVOURS)}."))
    driver = Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists()
    return asked or ("cuda" if driver else "cpu")


def find_wheel(name: str, version: str, scratch: Path) -> Path:
    """A wheel from the folder `FORK_WHEEL_DIR`, else one that pip downloads into `scratch`."""
    pattern = f"{name.replace('-', '_')}-{version}-*.whl"
    if folder := os.environ.get("FORK_WHEEL_DIR"):
        if found := sorted(Path(folder).glob(pattern)):
            return found[0]
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:",
               "--dest", str(scratch), f"{name}=={version}"]
    print(f"fork: fetching {name} {version}", flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ForkError(Problem("pyproject.toml", 1, "FETCH", f"pip could not download {name} {version}",
                                done.stderr.strip(), f"Put {pattern} into a folder and name it in FORK_WHEEL_DIR."))
    return next(scratch.glob("*.whl"))


def unpack(wheel: Path, tree: Path) -> None:
    """Unpacks a wheel with its files read-only; a member that would leave `tree` is refused by zipfile."""
    with zipfile.ZipFile(wheel) as archive:
        for info in archive.infolist():
            path = archive.extract(info, tree)
            if not info.is_dir():
                os.chmod(path, 0o555 if info.external_attr >> 16 & 0o111 else 0o444)
    for path, digest in record(tree).items():
        if path.endswith(".py") and file_sha256(tree / path) != digest:
            raise ForkError(Problem(str(wheel), 1, "HASH", f"{path} is not what the wheel's RECORD says"))


def record(tree: Path) -> dict[str, str]:
    """Path -> sha256 of the files under `vllm/`, from the wheel's RECORD."""
    with open(next(tree.glob("*.dist-info/RECORD")), newline="") as file:
        rows = [(path, digest) for path, digest, _ in csv.reader(file) if path.startswith("vllm/")]
    return {path: base64.urlsafe_b64decode(digest.removeprefix("sha256=") + "=").hex() for path, digest in rows}


def file_sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
