"""The patch series: which topic each definition of ours belongs to, and the export as ordinary patches."""

import os
import shutil
import subprocess
import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tools.fork.base import Fork
from tools.fork.parse import ForkError, Problem
from tools.fork.tree import compose_all, our_files, source

FIELDS = {"name", "title", "why", "upstream", "remove-when", "members"}
# Tests of this repository itself, which no upstream pull request would carry.
OWN_TESTS = ("tests/fork/", "tests/conftest.py", "tests/test_composed.py", "tests/test_demo.py", "tests/__init__.py")
WHO = "vLLM fork <fork@example.invalid>"
WHEN = "2026-01-01T00:00:00Z"


@dataclass(frozen=True)
class Topic:
    """One upstream pull request."""

    name: str
    title: str
    why: str
    members: tuple[str, ...]

    def holds(self, name: str) -> bool:
        """Whether a file, or `path::Member`, belongs here: named, or inside something named."""
        return any(name == m or name.startswith((f"{m}::", f"{m}.")) or (m.endswith("/") and name.startswith(m))
                   for m in self.members)


def topics(root: Path) -> list[Topic]:
    """Reads `series.toml`.

    Raises:
        ForkError: SERIES for a topic with missing or unknown fields.
    """
    with open(root / "series.toml", "rb") as file:
        entries = tomllib.load(file).get("topic", [])
    for entry in entries:
        if wrong := FIELDS ^ entry.keys():
            raise ForkError(Problem("series.toml", 1, "SERIES", f"topic {entry.get('name')}: missing or unknown fields",
                                    ", ".join(sorted(wrong)), f"A topic has {', '.join(sorted(FIELDS))}."))
    return [Topic(e["name"], e["title"], e["why"].strip(), tuple(e["members"])) for e in entries]


def definitions(fork: Fork, base: Path) -> list[tuple[str, int]]:
    """All that belongs into a topic: (file or `path::Member`, line)."""
    found = [(path, 1) for path in our_files(fork.root, "tests") if not path.startswith(OWN_TESTS)]
    for path in our_files(fork.root):
        if (base / path).exists():
            items = source(fork.root, path).items
            found += [(f"{path}::{i.name}", i.line) for i in items if i.verb != "extend" or i.arg]
        else:
            found.append((path, 1))
    return found


def check_series(fork: Fork, base: Path) -> list[Problem]:
    """SERIES for each definition of ours that is not in exactly one topic, and each name that stands for nothing."""
    problems = []
    series, ours = topics(fork.root), definitions(fork, base)
    for name, line in ours:
        homes = [topic.name for topic in series if topic.holds(name)]
        if len(homes) != 1:
            problems.append(Problem(name.partition("::")[0], line, "SERIES", f"{name} belongs to {len(homes)} topics",
                                    ", ".join(homes), "Name it under `members` of one topic of series.toml."))
    rows = (fork.root / "series.toml").read_text().split("\n")
    for topic in series:
        for member in topic.members:
            alone = Topic("", "", "", (member,))
            if not any(alone.holds(name) for name, _ in ours):
                line = next((n for n, row in enumerate(rows, 1) if f'"{member}"' in row), 1)
                problems.append(Problem("series.toml", line, "SERIES", f"topic {topic.name}: there is no {member}",
                                        todo="Correct or drop the entry."))
    return problems


def export(fork: Fork, base: Path, only: str | None = None) -> list[Path]:
    """Writes `dist/series/NNNN-*.patch`, or `dist/<topic>/` with that topic alone on the base.

    Raises:
        ForkError: SERIES for an unknown topic or an incomplete series, and what composing part of it finds.
    """
    if only is None and (problems := check_series(fork, base)):
        raise ForkError(*problems)
    series = [t for t in topics(fork.root) if only in (None, t.name)]
    if not series:
        raise ForkError(Problem("series.toml", 1, "SERIES", f"there is no topic {only}",
                                todo="Name one of: " + ", ".join(t.name for t in topics(fork.root))))
    out = fork.root / "dist" / (only or "series")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as scratch:
        repo = Path(scratch)
        git(repo, "init", "--quiet", "--template=", "--initial-branch=main")
        for path in our_files(fork.root):
            if (base / path).exists():
                put(repo / path, (base / path).read_bytes())
        commit(repo, f"Base: {base.name}")
        for n in range(len(series)):
            def active(name: str, done: list[Topic] = series[: n + 1]) -> bool:
                return any(topic.holds(name) for topic in done)

            contents, _ = compose_all(fork, base, active)
            tests = [path for path in our_files(fork.root, "tests") if active(path)]
            for path, data in [*contents.items(), *((p, (fork.root / p).read_bytes()) for p in tests)]:
                put(repo / path, data)
            commit(repo, f"{series[n].title}\n\n{series[n].why}")
        # keep-subject: titles keep their brackets; zero-commit and no-signature: the same bytes every time and
        # everywhere; full-index: blobs named in full, whatever else a repository holds.
        git(repo, "format-patch", "--quiet", "--keep-subject", "--zero-commit", "--no-signature", "--full-index",
            "--no-renames", "--output-directory", str(out), f"HEAD~{len(series)}")
    return sorted(out.glob("*.patch"))


def put(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def commit(repo: Path, message: str) -> None:
    git(repo, "add", "--all", "--force")
    git(repo, "commit", "--quiet", "--allow-empty", "--cleanup=verbatim", f"--message={message}")


def git(repo: Path, *arguments: str) -> None:
    """Runs git without any of the user's configuration."""
    name, mail = WHO.removesuffix(">").split(" <")
    environment = {"PATH": os.environ["PATH"], "HOME": str(repo), "LC_ALL": "C", "GIT_CONFIG_NOSYSTEM": "1",
                   "GIT_CONFIG_GLOBAL": os.devnull, "GIT_ATTR_NOSYSTEM": "1"}
    for role in ("AUTHOR", "COMMITTER"):
        environment |= {f"GIT_{role}_NAME": name, f"GIT_{role}_EMAIL": mail, f"GIT_{role}_DATE": WHEN}
    subprocess.run(["git", *arguments], cwd=repo, env=environment, check=True)
