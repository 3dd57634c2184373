"""The commands of `./fork`."""

import argparse
import difflib
import sys

from tools.fork.base import Fork
from tools.fork.check import check, unknown_names
from tools.fork.compose import Composer
from tools.fork.parse import DEFINITIONS, ForkError, Problem, Source
from tools.fork.series import check_series, export
from tools.fork.tree import our_files, source, sync, where

EPILOG = """\
To amend a member of upstream's: `./fork show vllm/a.py` lists what there is; write vllm/a.py with our version under
`# fork: edit`, `# fork: replace` or `# fork: extend`; `./fork pin vllm/a.py`; `./fork sync`; `./fork check`.

environment:
  VLLM_TARGET_DEVICE  cpu or cuda; unset, cuda where an NVIDIA driver is visible
  FORK_WHEEL_DIR      a folder to take the released wheel from, instead of downloading it"""


def main(arguments: list[str] | None = None) -> int:
    """Runs one command; returns the exit status."""
    parser = argparse.ArgumentParser(prog="fork", description="Joins our lines with released vLLM.", epilog=EPILOG,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, *names: str) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        for argument in names:
            sub.add_argument(argument)
        return sub

    command("sync", "Write .fork/composed/ from the pinned release and our files.")
    command("check", "Compose in memory and run every check; write nothing.")
    command("show", "Print base, ours and composed of PATH or PATH::MEMBER, with today's pin.", "target")
    command("pin", "Print what changed at PATH[::MEMBER] since it was pinned, then write today's pin.", "target")
    command("where", "Say where the line FILE:LINE of the composed tree comes from.", "place")
    command("rebase", "Compare our members with another release: OK, DRIFT, GONE, EXISTS or LANDED.", "version")
    patches = command("export", "Write the series, or one TOPIC of it, as patches into dist/.")
    patches.add_argument("topic", nargs="?")
    patches.add_argument("--onto", metavar="VERSION", help="compose onto this release instead of the pinned one")
    options = parser.parse_args(arguments)
    try:
        return globals()[f"run_{options.command}"](Fork(), options)
    except ForkError as error:
        print(error, file=sys.stderr)
        return 1


def run_sync(fork: Fork, options: argparse.Namespace) -> int:
    count = sync(fork)
    print(f"fork: {fork.flavour}, {f'{count} files written' if count else 'nothing changed'}")
    return 0


def run_check(fork: Fork, options: argparse.Namespace) -> int:
    base = fork.base()
    problems = check(fork, base) + check_series(fork, base)
    if problems:
        raise ForkError(*problems)
    print("fork: all checks passed")
    return 0


def run_show(fork: Fork, options: argparse.Namespace) -> int:
    path, _, name = options.target.partition("::")
    base = fork.base()
    there, ours = (source(top, path) if (top / path).exists() else None for top in (base, fork.root))
    if not (there or ours) or name and not any(module.find(name) for module in (there, ours) if module):
        raise ForkError(Problem(path, 1, "GONE", f"neither upstream nor we define {name or 'this file'}",
                                todo=f"List upstream's members with `./fork show {path}`."))
    if there and not name:
        _list(there, there.tree.body, "")
    _print("base", there, name)
    _print("ours", ours, name)
    if there and ours:  # last, since after a drift composing fails
        composed = Source(path, Composer(there, ours).run().text.encode())
        _print("composed", composed, name)
        if not name:
            rows = difflib.unified_diff(there.text.splitlines(True), composed.text.splitlines(True), "base", "composed")
            sys.stdout.writelines(rows)
    return 0


def _print(title: str, module: Source | None, name: str) -> None:
    if module and name:
        for member in module.find(name):
            print(f"--- {title}, {module.path}:{member.start}, pin {module.pin(member)}\n{module.source(member)}")


def _list(module: Source, body: list, owner: str) -> None:
    for member in module.members(body):
        print(f"{module.pin(member)}  {member.start:5}  {owner}{member.key}")
        if isinstance(member.node, DEFINITIONS) and hasattr(member.node, "bases"):
            _list(module, member.node.body, f"{owner}{member.key}.")


def run_pin(fork: Fork, options: argparse.Namespace) -> int:
    path, _, name = options.target.partition("::")
    base = fork.base()
    if not (base / path).exists() or not (fork.root / path).exists():
        raise ForkError(Problem(path, 1, "GONE", "no amending file: one of upstream and us lacks it"))
    there, ours = source(base, path), source(fork.root, path)
    items = [i for i in ours.items if i.verb in ("replace", "edit") and name in ("", i.name)]
    if not items:
        raise ForkError(Problem(path, 1, "GONE", f"no replace or edit of ours called {name}"))
    lines = ours.text.split("\n")
    for item in items:
        found = there.find(item.name)
        if not found:
            raise ForkError(Problem(path, item.line, "GONE", f"upstream has no {item.name}"))
        pins = [there.pin(m) for m in found]
        if item.arg in pins:
            continue
        if len(found) > 1:
            raise ForkError(Problem(path, item.line, "ANCHOR", f"upstream defines {item.name} {len(found)} times",
                                    "\n".join(f"line {m.start}, pin {p}" for m, p in zip(found, pins)),
                                    "Write the pin you mean yourself."))
        print(f"{item.name}: {item.arg or 'no pin'} -> {pins[0]}")
        for other in sorted((fork.home / "base").iterdir()):
            if not (other / path).exists():
                continue
            old = source(other, path)
            for member in old.find(item.name):
                if old.pin(member) == item.arg:
                    print(*difflib.unified_diff(old.source(member).split("\n"), there.source(found[0]).split("\n"),
                                                other.name, base.name, lineterm=""), sep="\n")
        line = lines[item.line - 1]
        lines[item.line - 1] = line[: line.index(item.verb)] + f"{item.verb} {pins[0]}"
    (fork.root / path).write_bytes("\n".join(lines).encode())
    return 0


def run_where(fork: Fork, options: argparse.Namespace) -> int:
    path, _, line = options.place.rpartition(":")
    if not path or not line.isdigit():
        raise ForkError(Problem(options.place, 1, "FORM", "this is no FILE:LINE"))
    print(where(fork, path.partition("composed/")[2] or path, int(line)))
    return 0


def run_rebase(fork: Fork, options: argparse.Namespace) -> int:
    old, new = fork.base(), fork.base(options.version)
    report: list[tuple[str, str, str]] = []
    modules = {p: source(fork.root, p) for p in our_files(fork.root) if p.endswith(".py") and not (old / p).exists()}
    for path in our_files(fork.root):
        ours = source(fork.root, path) if path.endswith(".py") else None
        if not (old / path).exists():
            code = "OK"
            if (new / path).exists():
                code = "LANDED" if (new / path).read_bytes() == (fork.root / path).read_bytes() else "EXISTS"
            report.append((code, path, ""))
            if ours:
                report += [("NAME", path, p.what) for p in unknown_names(ours, modules, new, None)]
        elif ours and (new / path).exists():
            there, before = source(new, path), source(old, path)
            for name, problems in Composer(there, ours).findings().items():
                sizes = [f"{len(m.source(d[0]).splitlines())}" for m in (before, there) if (d := m.find(name))]
                lines = f"{' -> '.join(sizes)} lines" if sizes else ""
                if problems or name != "imports":
                    code = problems[0].code if problems else "OK"
                    report.append((code, f"{path}::{name}", lines if code in ("OK", "DRIFT") else problems[0].what))
        elif ours:
            report += [("GONE", f"{path}::{item.name}", "the file is gone") for item in ours.items]
    for code, name, what in report:
        print(f"{code:7} {name}  {what}".rstrip())
    counts = {code: sum(row[0] == code for row in report) for code in sorted({row[0] for row in report})}
    print(f"fork: {new.name}: " + ", ".join(f"{count} {code}" for code, count in counts.items()))
    return int(counts.keys() != {"OK"})


def run_export(fork: Fork, options: argparse.Namespace) -> int:
    for patch in export(fork, fork.base(options.onto), options.topic):
        print(patch.relative_to(fork.root))
    print("fork: apply them with `git am --keep-non-patch`")
    return 0
