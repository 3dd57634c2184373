"""Splicing our amending files into upstream's modules, byte for byte outside the touched spans."""

import ast
import re
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from tools.fork.parse import (
    BODY_VERBS,
    DEFINITIONS,
    IMPORTS,
    ForkError,
    Function,
    Item,
    Member,
    Problem,
    Source,
    import_parts,
    inner_statements,
    is_constant,
    is_type_checking,
    select,
    value_of,
)

UNTOUCHABLE = ("vllm/__init__.py", "vllm/_version.py", "vllm/platforms/__init__.py")
ATOMS = (ast.Name, ast.Call, ast.Attribute, ast.Constant, ast.Subscript, ast.JoinedStr, ast.List, ast.Dict, ast.Set,
         ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)
Piece = tuple[str, int]  # text of ours, line it stands on in our file


@dataclass
class Composed:
    """A composed module; `runs` holds [first line, count, 1 if ours else 0, first line there]."""

    text: str
    tree: ast.Module
    runs: list[list[int]]


@dataclass
class Composer:
    """Composes one module.

    Attributes:
        base: Upstream's module.
        ours: Our amending file at the same path.
        active: Says by `path::Member` which of our definitions take part.
    """

    base: Source
    ours: Source
    active: Callable[[str], bool] = lambda name: True
    splices: list[tuple[int, int, list[Piece]]] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    placed: dict[str, tuple[int, str]] = field(default_factory=dict)

    def run(self) -> Composed:
        """Applies every active directive.

        Raises:
            ForkError: With all that was found wrong.
        """
        self.findings()
        if self.problems:
            raise ForkError(*self.problems)
        return self.assemble()

    def findings(self) -> dict[str, list[Problem]]:
        """Works every active directive out; what was found wrong, by definition, and under `imports`."""
        if self.ours.path in UNTOUCHABLE:
            what = "this file cannot be amended: the version, the platform and the package root are upstream's"
            raise self.fail(1, "FORM", what, todo="Amend the caller, or write a new file.")
        items = [item for item in self.ours.items if self.active(f"{self.ours.path}::{item.name}")]
        found = {}
        for item in items:
            before = len(self.problems)
            with self.collecting():
                getattr(self, item.verb)(item)
            if self.problems[before:] or item.verb != "extend" or item.arg:
                found[item.name] = self.problems[before:]
        before = len(self.problems)
        self.imports(items)
        return found | {"imports": self.problems[before:]}

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Lets the work go on after a finding, so that all of them come at once."""
        try:
            yield
        except ForkError as error:
            self.problems += error.problems

    def fail(self, item: Item | int, code: str, what: str, seen: str = "", todo: str = "") -> ForkError:
        line = item if isinstance(item, int) else item.line
        return ForkError(Problem(self.ours.path, line, code, what, seen, todo))

    def splice(self, start: int, end: int, pieces: list[Piece]) -> None:
        self.splices.append((start, end, pieces))

    # What an item refers to upstream

    def scope(self, item: Item) -> list[ast.stmt]:
        body = self.base.scope(item.owner)
        if body is None:
            raise self.fail(item, "GONE", f"upstream has no class {'.'.join(item.owner)} (or several)",
                            todo=f"Look at `./fork show {self.base.path}`.")
        return body

    def upstream(self, item: Item) -> list[Member]:
        return [m for m in self.base.members(self.scope(item)) if m.key == item.member.key]

    def target(self, item: Item, pinned: bool = False) -> Member:
        """The one upstream member an item amends, chosen by its pin where it has one."""
        found = self.upstream(item)
        here, what = f"{self.ours.path}::{item.name}", f"{item.name}: "
        if not found:
            raise self.fail(item, "GONE", what + f"upstream has nothing of that name to {item.verb}",
                            todo=f"Look for its new place with `./fork show {self.base.path}`, or `add` it.")
        if pinned and not item.arg:
            raise self.fail(item, "FORM", what + f"{item.verb} needs a pin", todo=f"Run `./fork pin {here}`.")
        pins = [self.base.pin(m) for m in found]
        fit = [m for m, pin in zip(found, pins) if not pinned or pin == item.arg]
        if not fit:
            sizes = ", ".join(f"{m.end - m.start + 1} lines, pin {pin}" for m, pin in zip(found, pins))
            ours = item.member.end - item.member.start + 1
            raise self.fail(item, "DRIFT", what + f"pinned to {item.arg}, and upstream's text is another",
                            f"upstream {sizes}; ours {ours} lines",
                            f"Read `./fork show {here}`, adapt ours, then run `./fork pin {here}`.")
        if len(fit) > 1:
            raise self.fail(item, "ANCHOR", what + f"upstream defines it {len(fit)} times",
                            "lines " + ", ".join(str(m.start) for m in fit), "Amend something that stands alone.")
        return fit[0]

    def whole_lines(self, item: Item, node: ast.stmt, replaced: bool = True) -> None:
        """Refuses a statement that shares its lines with others, or an elif that ours would stand before."""
        start, end = self.base.span(node)
        before = self.base.text[self.base.offset(node.lineno) : start]
        after = self.base.text[end : self.base.offset((node.end_lineno or 0) + 1)]
        elif_ = replaced and self.base.text.startswith("elif", start)
        if before.strip() or elif_ or not re.fullmatch(r"\s*(#.*)?\s*", after):
            raise self.fail(item, "ANCHOR", f"{item.name}: upstream's statement has no lines of its own",
                            f"{self.base.path}:{node.lineno}: {self.base.lines[node.lineno - 1].strip()}",
                            "Pick another one, use instead-of with a body of `...` on an elif, or replace the member.")

    # Our text

    def text(self, start: int, end: int, value: str | None = None) -> str:
        """A span of our file, with upstream's `value` for the name `upstream`."""
        text = self.ours.text[start:end]
        for first, last in reversed(self.ours.marks) if value else ():
            if start <= first < end:
                text = text[: first - start] + (value or "") + text[last - start :]
        return text

    def excerpt(self, first: int, last: int, indent: str, value: str | None = None) -> list[Piece]:
        """Our lines first..last without directives, moved from their own indentation to another one."""
        lines = [n for n in range(first, last + 1) if n not in self.ours.directives]
        while not self.ours.lines[lines[-1] - 1].strip():
            lines.pop()
        own = next(self.ours.indent(n) for n in lines if self.ours.lines[n - 1].strip())
        pieces = []
        for n in lines:
            text = self.text(self.ours.offset(n), self.ours.starts[n] - 1, value).rstrip("\r")
            if n not in self.ours.string_lines:
                text = indent + text[len(own) :] if text.startswith(own) and text.strip() else text.strip(" ")
            pieces.append((text + self.base.newline, n))
        return pieces

    def definition(self, item: Item, indent: str) -> list[Piece]:
        """One of our members, with the comments directly above it."""
        return self.excerpt(self.ours.comment_top(item.member.start), item.member.end, indent)

    # Directives above a definition

    def add(self, item: Item) -> None:
        body, name = self.scope(item), item.member.name
        if found := self.upstream(item):
            same = any(self.base.source(m) == self.ours.source(item.member) for m in found)
            raise self.fail(item, "LANDED" if same else "EXISTS", f"upstream defines {item.name} itself",
                            f"{self.base.path}:{found[0].start}",
                            "Delete ours: upstream has it." if same else "Use replace or edit, or another name.")
        after = ".".join((*item.owner, item.arg))
        anchors = [m for m in self.base.members(body) if item.arg in (m.name, m.key)]
        if item.arg and after in self.placed and not anchors:
            start, indent = self.placed[after]
            last = None
        elif item.arg:
            if not anchors:
                raise self.fail(item, "GONE", f"{item.name}: upstream has no {after} to stand after",
                                todo="Name another member of the same body, or leave `after` out.")
            last = max(anchors, key=lambda m: m.end).node
        else:
            last = body[-1]
            if not item.owner and isinstance(last, ast.If) and "__name__" in ast.unparse(last.test):
                last = body[-2]
        if last is not None:
            end = last.end_lineno or last.lineno
            self.whole_lines(item, last, replaced=False)
            first = min([last.lineno, *(d.lineno for d in getattr(last, "decorator_list", ()))])
            start, indent = self.base.offset(end + 1), self.base.indent(first)
        self.placed[item.name] = self.placed[".".join((*item.owner, name))] = start, indent
        plain = not isinstance(item.member.node, DEFINITIONS)
        gap = 0 if plain and (last is None or isinstance(last, (ast.Assign, ast.AnnAssign))) else 2 - bool(indent)
        blank = (self.base.newline, item.member.start)
        pieces = [blank] * gap + self.definition(item, indent)
        if start == len(self.base.text) and not self.base.text.endswith("\n"):
            pieces.insert(0, blank)
        follows = self.base.text[start:].partition("\n")[0]
        if not plain and follows.strip() and self.base.text[start - 2 : start] != "\n\n":
            pieces += [blank] * gap
        self.splice(start, start, pieces)

    def extend(self, item: Item) -> None:
        theirs, ours = self.target(item).node, item.member.node
        if not isinstance(theirs, ast.ClassDef):
            raise self.fail(item, "GONE", f"{item.name} is no class upstream")
        if item.arg:
            self.splice(*_header(self.base, theirs), [(self.text(*_header(self.ours, ours)), ours.lineno)])

    def replace(self, item: Item) -> None:
        theirs = self.target(item, pinned=True)
        self.whole_lines(item, theirs.node)
        pieces = self.definition(item, self.base.indent(theirs.start))
        self.splice(self.base.offset(theirs.start), self.base.offset(theirs.end + 1), pieces)

    def append(self, item: Item) -> None:
        theirs = self.target(item)
        display = _display(theirs.node)
        mine = _display(item.member.node)
        if display is None or mine is None or type(display) is not type(mine):
            raise self.fail(item, "FORM", f"{item.name}: append joins a list, tuple, set or dict to one of its kind",
                            f"{self.base.path}:{theirs.start}")
        have = {ast.dump(key) for key, _ in _elements(display)}
        for key, _ in _elements(mine):
            if ast.dump(key) in have:
                raise self.fail(item, "EXISTS", f"{item.name} holds {ast.unparse(key)} already",
                                f"{self.base.path}:{theirs.start}", "Drop the element.")
        pieces = [(self.text(self.ours.span(key)[0], self.ours.span(value)[1]), key.lineno)
                  for key, value in _elements(mine)]
        elements = _elements(display)
        if elements:
            self.join(*elements[-1], pieces)
        else:
            start = self.base.span(display)[0] + 1
            self.splice(start, start, [((", " if n else "") + text, line) for n, (text, line) in enumerate(pieces)])

    def at_end(self, item: Item) -> None:
        """Puts a plain statement at the end of the module."""
        end = len(self.base.text)
        gap = 1 + (not self.base.text.endswith("\n"))
        blank = (self.base.newline, item.member.start)
        self.splice(end, end, [blank] * gap + self.definition(item, ""))

    def join(self, first: ast.expr, last: ast.expr, pieces: list[Piece]) -> None:
        """Puts more elements behind the one from `first` to `last`, on lines of their own where it has one."""
        end = self.base.offset(last.end_lineno or 0, last.end_col_offset or 0)
        head = self.base.text[self.base.offset(first.lineno) : self.base.offset(first.lineno, first.col_offset)]
        own_line = not head.strip(" *")
        tail = re.compile(r",[ \t]*(#[^\n]*?)?(?=\r?\n)").match(self.base.text, end) if own_line else None
        if tail:
            pad = self.base.newline + self.base.indent(first.lineno)
            self.splice(tail.end(), tail.end(), [(f"{pad}{text},", line) for text, line in pieces])
        else:
            self.splice(end, end, [(f", {text}", line) for text, line in pieces])

    # Directives inside an edit

    def edit(self, item: Item) -> None:
        theirs = self.target(item, pinned=True)
        function, mine = theirs.node, item.member.node
        assert isinstance(function, Function) and isinstance(mine, Function)
        inside = sorted(n for n in self.ours.directives if item.member.start < n <= item.member.end)
        if not inside:
            raise self.fail(item, "FORM", f"{item.name}: an edit without a directive inside",
                            todo="Say `# fork: at start` or another place above our statements.")
        known = {a.arg for a in ast.walk(function) if isinstance(a, ast.arg)} | {"upstream"}
        known |= {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
        known |= {a.asname or a.name for n in ast.walk(function) if isinstance(n, IMPORTS) for a in n.names}
        for arg in (a for a in ast.walk(mine.args) if isinstance(a, ast.arg)):
            if arg.arg not in known:
                raise self.fail(arg.lineno, "NAME", f"{item.name}: upstream's function knows no {arg.arg}",
                                todo="The header of an edit lists upstream's names that our statements use.")
        body = [s for s in mine.body if not is_constant(s)]
        for s in body:
            if s.lineno < inside[0] or any(s.lineno < n <= (s.end_lineno or 0) for n in inside):
                raise self.fail(s.lineno, "FORM", f"{item.name}: this statement is not below one directive",
                                todo="Inside an edit, each statement stands below the directive that places it.")
        for n, after in zip(inside, [*inside[1:], item.member.end + 1]):
            with self.collecting():
                self.place(item, function, n, after - 1, [s for s in body if n < s.lineno < after])

    def place(self, item: Item, function: Function, line: int, last: int, body: list[ast.stmt]) -> None:
        """Carries out the directive on `line` inside an edit; our statements stand on the lines behind it."""
        text = self.ours.directives[line]
        match = BODY_VERBS.fullmatch(text)
        if not match:
            raise self.fail(line, "FORM", f"`# fork: {text}` is no directive inside an edit",
                            todo="Known: at start, at end, before, after, instead-of or drop SEL.")
        verb, arg = match["verb"], match["arg"]
        if bool(body) == (verb == "drop"):
            count = "no" if body else "a"
            raise self.fail(line, "FORM", f"`# fork: {text}` takes {count} statement of ours below it")
        found = select(function, arg) if arg else [function.body[-(verb == "at end")]]
        if len(found) != 1:
            seen = ", ".join(str(s.lineno) for s in found)
            raise self.fail(line, "ANCHOR", f"{item.name}: `{arg}` matches {len(found)} statements",
                            f"{self.base.path}: lines {seen}" if found else "",
                            "Pick one with an index, such as `return[1]`." if found else "Name another one.")
        node = found[0]
        if verb == "instead-of":
            return self.instead(item, node, line, last, body)
        if verb == "drop":
            self.whole_lines(item, node)
            start = self.base.offset(self._comment_top(node.lineno))
            return self.splice(start, self.base.offset((node.end_lineno or 0) + 1), [])
        before = verb == "before" or (verb == "at start" and not is_constant(node))
        self.whole_lines(item, node, before)
        start = self.base.offset(self._comment_top(node.lineno) if before else (node.end_lineno or 0) + 1)
        pieces = self.excerpt(line + 1, last, self.base.indent(node.lineno))
        if start == len(self.base.text) and not self.base.text.endswith("\n"):
            pieces.insert(0, (self.base.newline, line))
        self.splice(start, start, pieces)

    def _comment_top(self, line: int) -> int:
        """First of the comment lines directly above an upstream statement, which belong to it."""
        indent = self.base.indent(line)
        while line > 1 and self.base.lines[line - 2].startswith(indent + "#"):
            line -= 1
        return line

    def instead(self, item: Item, node: ast.stmt, line: int, last: int, body: list[ast.stmt]) -> None:
        """Puts ours for a statement, or for a compound one's test (iterable, context) if our body there is `...`."""
        theirs = value_of(node)
        if theirs is None and any(line < bisect(self.ours.starts, start) <= last for start, _ in self.ours.marks):
            raise self.fail(line, "ANCHOR", f"{item.name}: the statement has no value that `upstream` could be",
                            f"{self.base.path}:{node.lineno}: {type(node).__name__}")
        value = self.base.segment(theirs) if theirs else ""
        # As a part of our expression it keeps its meaning and its line breaks only in brackets, unless it is atomic.
        value = value if isinstance(theirs, ATOMS) and _stands_alone(value) else f"({value})"
        inner = getattr(body[0], "body", None)
        if len(body) == 1 and inner and all(map(is_constant, inner)):
            mine = value_of(body[0])
            if type(body[0]) is not type(node) or theirs is None or mine is None:
                raise self.fail(line, "ANCHOR", f"{item.name}: ours and upstream's statement are of different kinds",
                                f"{self.base.path}:{node.lineno}: {type(node).__name__}")
            text = self.text(*self.ours.span(mine), value)
            text = (text if _stands_alone(text) else f"({text})").replace("\n", self.base.newline)
            self.splice(*self.base.span(theirs), [(text, mine.lineno)])
            return
        self.whole_lines(item, node)
        pieces = self.excerpt(line + 1, last, self.base.indent(node.lineno), value)
        self.splice(self.base.offset(node.lineno), self.base.offset((node.end_lineno or 0) + 1), pieces)

    # Imports and assembly

    def imports(self, items: list[Item]) -> None:
        """Checks what we import from this module itself; merges the other imports our items use."""
        module = self.base.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        own = {item.member.name for item in self.ours.items}
        used = set(re.findall(r"\w+", "".join(text for item in items for text, _ in self.definition(item, ""))))
        body = self.ours.tree.body
        checking = [n for block in filter(is_type_checking, body) for n in inner_statements(block)]
        wanted: dict[tuple[bool, str], dict[str, int]] = {}
        for node in filter(lambda n: isinstance(n, IMPORTS), [*body, *checking]):
            for name, what, origin, tail in import_parts(node):
                have = self.base.bindings.get(name, set())
                with self.collecting():
                    if origin == module and what.partition(":")[2] not in self.base.bindings.keys() | own:
                        raise self.fail(node.lineno, "NAME", f"upstream's {module} has no {tail}")
                    if origin == module or what in have or name not in used:
                        continue
                    if origin == "__future__":
                        raise self.fail(node.lineno, "FORM", "a __future__ import would change upstream's module")
                    if have:
                        raise self.fail(node.lineno, "NAME", f"upstream binds {name} to something else",
                                        ", ".join(sorted(have)), "Import it under another name.")
                    if node in checking and not any(map(is_type_checking, self.base.tree.body)):
                        raise self.fail(node.lineno, "FORM", "upstream has no TYPE_CHECKING block",
                                        todo="Import it plainly.")
                    wanted.setdefault((node in checking, origin), {})[tail] = node.lineno
        if self.problems:
            return
        before, after = _words(self.base.tree), _words(self.assemble().tree)
        body = self.base.tree.body
        blocks = [(False, body), (True, inner_statements(next(filter(is_type_checking, body), ast.Pass())))]
        for late, body in blocks:
            first = next((n for n, s in enumerate(body) if isinstance(s, DEFINITIONS)), len(body))
            head = [s for s in body[:first] if isinstance(s, IMPORTS)]
            for node in head:
                start, end = self.base.offset(node.lineno), self.base.offset((node.end_lineno or 0) + 1)
                if "#" in self.base.text[start:end]:
                    continue
                parts = list(import_parts(node))
                origin, indent = parts[0][2], self.base.indent(node.lineno)
                keep = [tail for bound, *_, tail in parts if late or bound in after or bound not in before]
                tails = wanted.pop((late, origin), {}) if origin else {}
                if tails or len(keep) < len(parts):
                    text = _import(origin, [*keep, *tails], indent, self.base.newline) if keep or tails else ""
                    line = min(tails.values(), default=items[0].line)
                    self.splice(start, end, [(text, line)])
            for (_, origin), tails in [entry for entry in wanted.items() if entry[0][0] == late]:
                word, line = origin or min(tails).split()[0], min(tails.values())
                same = [s for s in head if isinstance(s, ast.ImportFrom) == bool(origin)]
                kin = [s for s in same if _module(s).split(".")[0] == word.split(".")[0]] or same or head or body[:1]
                last = ([s for s in kin if _module(s) <= word] or kin[:1])[-1]
                start = self.base.offset((last.end_lineno or 0) + 1)
                text = _import(origin, list(tails), self.base.indent(last.lineno), self.base.newline)
                self.splice(start, start, [(text, line)])

    def assemble(self) -> Composed:
        parts: list[str] = []
        origin: list[tuple[int, int]] = []  # of each composed line: (1 if ours, line there)
        row = cursor = 0

        def put(text: str, ours: int) -> None:
            nonlocal row
            parts.append(text)
            count = text.count("\n") + (not text.endswith("\n"))
            for n in range(count if text else 0):
                here = (1, ours) if ours else (0, bisect(self.base.starts, cursor) + n)
                if row + n == len(origin):
                    origin.append(here)
                elif ours:
                    origin[row + n] = here
            row += text.count("\n")

        for start, end, pieces in sorted(self.splices, key=lambda s: s[:2]):
            if start < cursor:
                line = pieces[0][1] if pieces else 1
                raise self.fail(line, "ANCHOR", "two of our changes touch the same upstream text",
                                f"{self.base.path}:{bisect(self.base.starts, start)}")
            put(self.base.text[cursor:start], 0)
            for text, line in pieces:
                put(text, line)
            cursor = end
        put(self.base.text[cursor:], 0)
        runs: list[list[int]] = []
        for n, (ours, line) in enumerate(origin, start=1):
            if runs and runs[-1][2] == ours and runs[-1][3] + runs[-1][1] == line:
                runs[-1][1] += 1
            else:
                runs.append([n, 1, ours, line])
        text = "".join(parts)
        try:
            return Composed(text, ast.parse(text), runs)
        except SyntaxError as error:
            raise self.fail(1, "FORM", "the composed module does not parse", str(error)) from None


def _stands_alone(text: str) -> bool:
    """Whether an expression's line breaks all lie inside its own brackets."""
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


def _words(tree: ast.AST) -> set[str]:
    """Words of a module outside its imports, those in strings included (annotations may be quoted)."""
    kept = [n for n in ast.walk(tree) if isinstance(n, (ast.Name, ast.Constant))]
    return set(re.findall(r"\w+", " ".join(n.id if isinstance(n, ast.Name) else str(n.value) for n in kept)))


def _module(node: ast.stmt) -> str:
    """The module an import names first."""
    return ast.unparse(node).split()[1] if isinstance(node, IMPORTS) else ""


def _import(origin: str, tails: list[str], indent: str, newline: str) -> str:
    """Writes imports as upstream's formatter does: constants, classes, functions; one a line beyond 88 columns."""
    if not origin:
        return "".join(f"{indent}import {tail}{newline}" for tail in sorted(tails))
    tails = sorted(tails, key=lambda t: ((not t.split()[0].isupper()) + t[0].islower(), t))
    line = f"{indent}from {origin} import {', '.join(tails)}{newline}"
    if len(line.rstrip()) <= 88:
        return line
    rows = "".join(f"{indent}    {tail},{newline}" for tail in tails)
    return f"{indent}from {origin} import ({newline}{rows}{indent}){newline}"


def _header(source: Source, node: ast.stmt) -> tuple[int, int]:
    """The span of a class header between the name and the colon."""
    assert isinstance(node, ast.ClassDef)
    name = re.compile(r"class\s+\w+").match(source.text, source.span(node)[0])
    assert name
    last = max([name.end(), *(source.span(part)[1] for part in [*node.bases, *(k.value for k in node.keywords)])])
    colon = re.compile(r"(?:#[^\n]*|[^:#])*").match(source.text, last)
    assert colon
    return name.end(), colon.end()


def _display(node: ast.stmt) -> ast.expr | None:
    """The list, tuple, set or dict of an assignment, also as the sole argument of a call or subscript."""
    value = getattr(node, "value", None)
    if isinstance(value, ast.Call) and len(value.args) == 1 and not value.keywords:
        value = value.args[0]
    if isinstance(value, ast.Subscript):
        value = value.slice
    return value if isinstance(value, (ast.List, ast.Tuple, ast.Set, ast.Dict)) else None


def _elements(display: ast.expr) -> list[tuple[ast.expr, ast.expr]]:
    """(key, value) of a dict's entries; (element, element) otherwise."""
    if isinstance(display, ast.Dict):
        return [(key or value, value) for key, value in zip(display.keys, display.values)]
    return [(element, element) for element in display.elts]  # type: ignore[attr-defined]
