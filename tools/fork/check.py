"""What a composed tree must also satisfy: no copied lines, legal definition order, known names, ruff's F rules."""

import ast
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tools.fork.base import Fork
from tools.fork.parse import DEFINITIONS, IMPORTS, Member, Problem, Source, import_parts
from tools.fork.tree import compose_all, parsed, source

RUN = 3  # consecutive lines that count as copied
SHARE, LEAST = 0.3, 6  # a larger share of a member of at least this many lines counts as copied


def check(fork: Fork, base: Path) -> list[Problem]:
    """Composes in memory and runs every check on our lines; writes nothing.

    Raises:
        ForkError: What composing itself finds.
    """
    contents, runs = compose_all(fork, base)
    ours = {path: source(fork.root, path) for path in contents if path.endswith(".py")}
    modules = {path: parsed(path, contents[path]) for path in ours}
    problems = copied(ours, {path: path in runs for path in ours}, base)
    for path, module in modules.items():
        problems += unknown_names(module, modules, base, runs.get(path))
        if path in runs:
            problems += wrong_order(module, runs[path])
    return problems + ruff(modules, runs, base)


def our_line(runs: list[list[int]] | None, line: int) -> int:
    """Our line behind a composed one; 0 for upstream's. New files, which have no runs, are ours throughout."""
    if runs is None:
        return line
    first, _, ours, there = next(run for run in reversed(runs) if run[0] <= line)
    return there + line - first if ours else 0


# Copied lines


@cache
def headers(module: Source) -> set[int]:
    """Lines that an amendment must repeat: signatures, decorators and imports."""
    found: set[int] = set()
    for node in ast.walk(module.tree):
        if isinstance(node, DEFINITIONS):
            found.update(range(node.lineno, node.body[0].lineno))
            found.update(d.lineno for d in node.decorator_list)
        elif isinstance(node, IMPORTS):
            found.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return found


def telling_lines(module: Source, member: Member) -> list[tuple[int, str]]:
    """A member's lines that say something of their own: no headers, comments, brackets or passed-on keywords."""
    lines = ((n, module.lines[n - 1].strip()) for n in range(member.start, member.end + 1) if n not in headers(module))
    return [(n, line) for n, line in lines if _tells(line)]


def _tells(line: str) -> bool:
    return len(line) >= 16 and not line.startswith("#") and len(re.findall(r"\w+", line)) >= 3 and not re.fullmatch(
        r"\w+=(self\.)?\w+,", line
    )


def copied(ours: dict[str, Source], amending: dict[str, bool], base: Path) -> list[Problem]:
    """COPIED for each member of ours whose lines repeat a file of upstream's."""
    members = []
    for path, module in ours.items():
        found = [i.member for i in module.items if i.verb != "extend"] if amending[path] else [
            m for m in module.members(module.tree.body) if isinstance(m.node, DEFINITIONS)
        ]
        members += [(path, m, telling_lines(module, m)) for m in found]
    owners: dict[str, set[int]] = {}
    for n, (_, _, lines) in enumerate(members):
        for _, line in lines:
            owners.setdefault(line, set()).add(n)
    problems: dict[int, Problem] = {}
    for place in sorted((base / "vllm").rglob("*.py")):
        theirs = list(map(str.strip, place.read_text().split("\n")))
        hits = owners.keys() & theirs
        near = Counter(n for line in hits for n in owners[line])
        triples: set[tuple[str, ...]] = set()
        for n in (n for n, count in near.items() if count >= 2 and n not in problems):
            path, member, lines = members[n]
            triples = triples or _runs([line for line in theirs if _tells(line)])
            texts = [line for _, line in lines]
            same = sum(line in hits for line in texts)
            run = next((k for k in range(len(texts)) if tuple(texts[k : k + RUN]) in triples), None)
            if run is not None or len(texts) >= LEAST and same > SHARE * len(texts):
                at = member.start if run is None else lines[run][0]
                what = f"{member.key}: {same} of {len(texts)} lines stand in upstream's {place.relative_to(base)}"
                problems[n] = Problem(path, at, "COPIED", what, ours[path].lines[at - 1].strip(),
                                      "Use edit, call super(), or import what is there.")
    return list(problems.values())


def _runs(lines: list[str]) -> set[tuple[str, ...]]:
    return set(zip(*(lines[n:] for n in range(RUN))))


# Names and order


def unknown_names(module: Source, modules: dict[str, Source], base: Path, runs: list[list[int]] | None
                  ) -> list[Problem]:
    """NAME for each import of ours from `vllm` that finds nothing there."""
    problems = []
    for node in ast.walk(module.tree):
        if not isinstance(node, ast.ImportFrom) or node.level or not (node.module or "").startswith("vllm."):
            continue
        line = our_line(runs, node.lineno)
        if not line:
            continue
        stem = (node.module or "").replace(".", "/")
        there = next((p for p in (f"{stem}.py", f"{stem}/__init__.py") if p in modules or (base / p).exists()), None)
        if there is None and not (base / stem).is_dir() and not any(p.startswith(stem + "/") for p in modules):
            problems.append(Problem(module.path, line, "NAME", f"there is no module {node.module}"))
            continue
        target = there and (modules.get(there) or source(base, there))
        for _, what, *_ in import_parts(node):
            name = what.partition(":")[2]
            inside = any(p in modules or (base / p).exists() for p in (f"{stem}/{name}.py", f"{stem}/{name}"))
            inside = inside or any(p.startswith(f"{stem}/{name}/") for p in modules)
            bound = target.bindings if target else {}
            if not inside and not bound.keys() & {name, "*", "__getattr__"}:
                problems.append(Problem(module.path, line, "NAME", f"{node.module} has no {name}"))
    return problems


def wrong_order(module: Source, runs: list[list[int]]) -> list[Problem]:
    """ORDER for names that a definition needs at once and that are bound only further down."""
    problems = []
    bound: set[str] = set()
    lazy = "annotations" in module.bindings
    later = {m.name: m.start for m in module.members(module.tree.body)}
    for node in module.tree.body:
        inside = {
            n.id if isinstance(n, ast.Name) else n.name
            for n in ast.walk(node)
            if isinstance(n, DEFINITIONS) or (isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
        }
        for name in _needed(node, lazy):
            if name.id not in bound | inside and later.get(name.id, 0) > node.lineno:
                if line := our_line(runs, name.lineno) or our_line(runs, later[name.id]):
                    problems.append(Problem(module.path, line, "ORDER", f"{name.id} is needed before it is defined",
                                            f"composed lines {name.lineno} and {later[name.id]}",
                                            "Place it with `# fork: add after NAME`."))
        bound.update(m.name for m in module.members([node]))
    return problems


def _needed(node: ast.AST, lazy: bool) -> Iterator[ast.Name]:
    """Names that run when a statement does: bases, decorators, defaults, class bodies; not function bodies."""
    parts: list[ast.AST | None] = list(ast.iter_child_nodes(node))
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        yield node
    elif isinstance(node, (*DEFINITIONS[:2], ast.Lambda)):
        parts = [*getattr(node, "decorator_list", ()), *node.args.defaults, *node.args.kw_defaults]
        if not lazy:
            parts += [a.annotation for a in ast.walk(node.args) if isinstance(a, ast.arg)]
            parts += [getattr(node, "returns", None)]
    elif isinstance(node, ast.AnnAssign) and lazy:
        parts = [node.value]
    for part in filter(None, parts):
        yield from _needed(part, lazy)


def ruff(modules: dict[str, Source], runs: dict[str, list[list[int]]], base: Path) -> list[Problem]:
    """Ruff's F findings on our lines of the composed modules, where ruff is installed."""
    with tempfile.TemporaryDirectory() as folder:
        for path, module in modules.items():
            place = Path(folder, path)
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(module.text.encode())
        command = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "--select", "F",
                   "--output-format", "concise", folder]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.stderr:
        print(f"fork: ruff did not run: {done.stderr.strip()}", file=sys.stderr)
    problems = []
    for row in re.findall(r"^(\S+?):(\d+):\d+: (F\d+) (.*)$", done.stdout.replace(folder + "/", ""), re.MULTILINE):
        path, line, code, what = row
        if line := our_line(runs.get(path), int(line)):
            problems.append(Problem(path, line, code, what))
    return problems
