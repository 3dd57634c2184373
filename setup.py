"""Composes the tree, then lets setuptools install it as `vllm`."""

import shutil
import sys
from pathlib import Path

from setuptools import Distribution, find_namespace_packages, setup

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from tools.fork.base import Fork  # noqa: E402
from tools.fork.parse import ForkError  # noqa: E402
from tools.fork.tree import sync  # noqa: E402


class BinaryDistribution(Distribution):
    """The tree holds compiled objects, though none is built here."""

    def has_ext_modules(self) -> bool:
        return True


def requirements(name: str) -> list[str]:
    """The lines of a requirements file, with those of the files it includes."""
    found = []
    for line in (ROOT / "requirements" / f"{name}.txt").read_text().splitlines():
        line = line.partition("#")[0].strip()
        if line.startswith("-r "):
            found += requirements(line.removeprefix("-r ").removesuffix(".txt"))
        elif line:
            found.append(line)
    return found


fork = Fork(ROOT)
try:
    sync(fork)
except ForkError as error:
    sys.exit(str(error))
shutil.rmtree(fork.home / "build", ignore_errors=True)  # what an earlier build left would be packed too

setup(
    version=fork.version,
    install_requires=requirements(fork.flavour),
    extras_require={name: requirements(name) for name in ("quantize", "accuracy", "test", "dev")},
    package_dir={"": ".fork/composed"},
    packages=find_namespace_packages(".fork/composed", include=["vllm", "vllm.*"]),
    package_data={"": ["*"]},
    include_package_data=False,
    distclass=BinaryDistribution,
    options={
        "build": {"build_base": ".fork/build"},
        "egg_info": {"egg_base": ".fork"},
        "bdist_wheel": {"py_limited_api": "cp311"},
    },
)
