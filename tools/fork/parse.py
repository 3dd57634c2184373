"""Reading modules as members: where each definition stands, and what our directives ask of it."""

import ast
import hashlib
import io
import re
import textwrap
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property

Function = ast.FunctionDef | ast.AsyncFunctionDef
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
IMPORTS = (ast.Import, ast.ImportFrom)
KINDS: dict[str, tuple[type[ast.stmt], ...]] = {
    "return": (ast.Return,),
    "raise": (ast.Raise,),
    "if": (ast.If,),
    "for": (ast.For, ast.AsyncFor),
    "with": (ast.With, ast.AsyncWith),
}
MEMBER_VERBS = re.compile(
    r"(?P<verb>add)(?: after (?P<after>[\w.]+))?|(?P<extend>extend)(?P<bases> bases)?"
    r"|(?P<pinned>replace|edit)(?: (?P<pin>[0-9a-f]{12}))?|(?P<append>append)"
)
BODY_VERBS = re.compile(r"(?P<verb>at (?:start|end)|(?:before|after|instead-of|drop)) ?(?P<arg>.*)")


@dataclass(frozen=True)
class Problem:
    """One finding: where, which code, what was seen and what to do about it."""

    path: str
    line: int
    code: str
    what: str
    seen: str = ""
    todo: str = ""

    def __str__(self) -> str:
        more = [textwrap.indent(part, "    ") for part in (self.seen, self.todo) if part]
        return "\n".join([f"{self.path}:{self.line}: {self.code}  {self.what}", *more])


class ForkError(Exception):
    """Findings that stop the work."""

    def __init__(self, *problems: Problem):
        super().__init__("\n".join(map(str, problems)))
        self.problems = problems


@dataclass(frozen=True)
class Member:
    """A definition in a module or class body; lines are 1-based, decorators included."""

    key: str
    node: ast.stmt
    start: int
    end: int

    @property
    def name(self) -> str:
        """The bare name, without `.setter` and the like."""
        return self.key.partition(".")[0]


@dataclass(frozen=True)
class Item:
    """One definition of ours in an amending file, with its directive."""

    owner: tuple[str, ...]
    member: Member
    verb: str
    arg: str
    line: int

    @property
    def name(self) -> str:
        return ".".join((*self.owner, self.member.key))


class Source:
    """A Python module as text, lines and syntax tree.

    Args:
        path: Path relative to the repository, for messages.
        data: The file's bytes, UTF-8.

    Raises:
        ForkError: FORM when the text does not parse.
    """

    def __init__(self, path: str, data: bytes):
        self.path = path
        try:
            self.text = data.decode()
            self.tree = ast.parse(self.text)
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None) or 1
            raise ForkError(Problem(path, line, "FORM", "does not parse", str(error))) from None
        self.lines = self.text.split("\n")
        self.newline = "\r\n" if self.lines[0].endswith("\r") else "\n"
        self.starts = [0]
        for line in self.lines:
            self.starts.append(self.starts[-1] + len(line) + 1)

    def offset(self, line: int, column: int = 0) -> int:
        """Turns a 1-based line and `ast`'s UTF-8 column into an index into `text`."""
        if line > len(self.lines):
            return len(self.text)
        return self.starts[line - 1] + len(self.lines[line - 1].encode()[:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)

    def segment(self, node: ast.expr) -> str:
        start, end = self.span(node)
        return self.text[start:end]

    def indent(self, line: int) -> str:
        text = self.lines[line - 1]
        return text[: len(text) - len(text.lstrip())]

    @cached_property
    def _scan(self) -> tuple[dict[int, str], set[int], set[int]]:
        comments: dict[int, str] = {}
        inside: set[int] = set()
        opened: list[int] = []
        for token in tokenize.generate_tokens(io.StringIO(self.text.replace("\r\n", "\n")).readline):
            kind, first, last = tokenize.tok_name[token.type], token.start[0], token.end[0]
            if kind == "COMMENT":
                comments[first] = token.string
            elif kind.endswith("STRING_START"):
                opened.append(first)
            elif kind == "STRING" or kind.endswith("STRING_END"):
                first = opened.pop() if kind != "STRING" else first
                inside.update(range(first + 1, last + 1))
        alone = {n for n in comments if self.lines[n - 1].lstrip().startswith("#")}
        return comments, alone, inside

    @property
    def string_lines(self) -> set[int]:
        """Lines that begin inside a string; their leading blanks are data."""
        return self._scan[2]

    @cached_property
    def directives(self) -> dict[int, str]:
        """Line number -> the text behind `# fork:`."""
        found = {n: c for n, c in self._scan[0].items() if re.match(r"#\s*fork:", c)}
        for n in found.keys() - self._scan[1]:
            raise ForkError(Problem(self.path, n, "FORM", "a directive stands on a line of its own"))
        return {n: " ".join(c.split("fork:", 1)[1].split()) for n, c in found.items()}

    @cached_property
    def marks(self) -> list[tuple[int, int]]:
        """Spans of the name `upstream`, in order."""
        for node in (n for s in ast.walk(self.tree) if isinstance(s, ast.JoinedStr) for n in ast.walk(s)):
            if isinstance(node, ast.Name) and node.id == "upstream":  # its quotes might clash, its column may be wrong
                what, todo = "`upstream` stands inside an f-string", "Give it a name of its own first."
                raise ForkError(Problem(self.path, node.lineno, "FORM", what, todo=todo))
        return sorted(self.span(n) for n in ast.walk(self.tree) if isinstance(n, ast.Name) and n.id == "upstream")

    def comment_top(self, line: int) -> int:
        """First line of the comment block directly above `line`, or `line` itself."""
        while line - 1 in self._scan[1]:
            line -= 1
        return line

    def member(self, node: ast.stmt) -> Member | None:
        """The member that a statement defines, or None."""
        if isinstance(node, DEFINITIONS):
            key = node.name
            for mark in node.decorator_list:
                if isinstance(mark, ast.Attribute) and ast.unparse(mark.value) == key:
                    key = f"{key}.{mark.attr}"
                elif ast.unparse(mark).rpartition(".")[2] == "overload":
                    key = f"{key}.overload"
            start = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        elif isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            key, start = node.targets[0].id, node.lineno
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            key, start = node.target.id, node.lineno
        else:
            return None
        return Member(key, node, start, node.end_lineno or start)

    def members(self, body: list[ast.stmt]) -> Iterator[Member]:
        """The members of a body, those under `if`, `try` and `with` included."""
        for node in body:
            if member := self.member(node):
                yield member
            elif isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from self.members(inner_statements(node))

    def scope(self, owner: tuple[str, ...]) -> list[ast.stmt] | None:
        """The body of a class named from the module down, or None."""
        body = self.tree.body
        for name in owner:
            classes = [m.node for m in self.members(body) if m.key == name and isinstance(m.node, ast.ClassDef)]
            if len(classes) != 1:
                return None
            body = classes[0].body
        return body

    def find(self, name: str) -> list[Member]:
        """All members called `Class.member` or `member` (or `Class.member.setter`)."""
        parts = name.split(".")
        for cut in range(len(parts)):
            body = self.scope(tuple(parts[:cut]))
            found = [m for m in self.members(body or []) if m.key == ".".join(parts[cut:])]
            if found:
                return found
        return []

    def source(self, member: Member) -> str:
        """A member's text after dedent, without trailing blanks; what a pin is taken of."""
        lines = self.text.replace("\r\n", "\n").split("\n")[member.start - 1 : member.end]
        return "\n".join(line.rstrip() for line in textwrap.dedent("\n".join(lines)).split("\n")).strip("\n")

    def pin(self, member: Member) -> str:
        return hashlib.sha256(self.source(member).encode()).hexdigest()[:12]

    @cached_property
    def bindings(self) -> dict[str, set[str]]:
        """Names bound at module level -> what they are bound to: `import` descriptions, or `=`."""
        found: dict[str, set[str]] = {}
        for node in _flat(self.tree.body):
            if isinstance(node, IMPORTS):
                for name, what, *_ in import_parts(node):
                    found.setdefault(name, set()).add(what)
                continue
            names = [node.name] if isinstance(node, DEFINITIONS) else []
            if not names:
                names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)]
            for name in names:
                found.setdefault(name, set()).add("=")
        return found

    @cached_property
    def items(self) -> list[Item]:
        """Our definitions in order; raises FORM for whatever the composer would not carry over."""
        found: list[Item] = []
        used: set[int] = set()
        self._visit(self.tree.body, (), found, used)
        for item in found:
            if item.verb == "edit":
                used.update(n for n in self.directives if item.member.start < n <= item.member.end)
        for n in self.directives.keys() - used:
            raise ForkError(Problem(self.path, n, "FORM", "this directive stands above no definition"))
        return found

    def _visit(self, body: list[ast.stmt], owner: tuple[str, ...], found: list[Item], used: set[int]) -> None:
        for node in body:
            late = is_type_checking(node) and all(isinstance(n, IMPORTS) for n in inner_statements(node))
            if isinstance(node, ast.Pass) or is_constant(node) or ((isinstance(node, IMPORTS) or late) and not owner):
                continue
            member = self.member(node)
            top = self.comment_top(member.start if member else node.lineno)
            lines = [n for n in range(top, member.start if member else node.lineno) if n in self.directives]
            if member is None:
                if owner or [self.directives[n] for n in lines] != ["at end"]:
                    what = "an amending file holds imports, definitions, and statements under `# fork: at end`"
                    todo = "Put the statement into a function of a new file, or `edit` the function that should run it."
                    raise ForkError(Problem(self.path, node.lineno, "FORM", what, todo=todo))
                used.update(lines)
                last = Member(f"line-{node.lineno}", node, node.lineno, node.end_lineno or node.lineno)
                found.append(Item(owner, last, "at_end", "", lines[0]))
                continue
            text, line = (self.directives[lines[0]], lines[0]) if lines else ("add", member.start)
            match = MEMBER_VERBS.fullmatch(text)
            if not match or len(lines) > 1:
                what = f"`# fork: {text}` is no directive, or not the only one here"
                todo = "Known above a definition: add [after NAME], extend [bases], replace PIN, edit PIN, append."
                raise ForkError(Problem(self.path, line, "FORM", what, todo=todo))
            verb = next(filter(None, match.group("verb", "extend", "pinned", "append")))
            arg = (match["after"] or match["bases"] or match["pin"] or "").strip()
            used.update(lines)
            item = Item(owner, member, verb, arg, line)
            wrong = {
                "extend": not isinstance(node, ast.ClassDef),
                "edit": not isinstance(node, Function),
                "append": not isinstance(node, (ast.Assign, ast.AnnAssign)),
            }
            if wrong.get(verb):
                raise ForkError(Problem(self.path, line, "FORM", f"{item.name} is nothing to {verb}"))
            found.append(item)
            if verb == "extend":
                assert isinstance(node, ast.ClassDef)
                if not arg and (node.bases or node.keywords or node.decorator_list):
                    what = f"the header of {item.name} names bases or decorators, and an extended class keeps its own"
                    raise ForkError(Problem(self.path, line, "FORM", what, todo="Drop them, or say `extend bases`."))
                self._visit(node.body, (*owner, node.name), found, used)


def inner_statements(node: ast.AST) -> list[ast.stmt]:
    """Statements directly inside a compound one, in source order, handlers and cases included."""
    found: list[ast.stmt] = []
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt):
            found.append(child)
        elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
            found += child.body
    return found


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    for node in body:
        yield node
        if not isinstance(node, DEFINITIONS):
            yield from _flat(inner_statements(node))


def statements(function: ast.stmt) -> list[ast.stmt]:
    """A function's statements in source order, without those of functions and classes inside it."""
    return list(_flat(inner_statements(function)))


def is_constant(node: ast.stmt) -> bool:
    """Whether a statement is a docstring or `...`."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).rpartition(".")[2] == "TYPE_CHECKING"


def import_parts(node: ast.stmt) -> Iterator[tuple[str, str, str, str]]:
    """Yields (name bound, what it is bound to, module or "" for a plain import, name as imported) per alias."""
    assert isinstance(node, IMPORTS)
    origin = "." * node.level + (node.module or "") if isinstance(node, ast.ImportFrom) else ""
    for alias in node.names:
        tail = f"{alias.name} as {alias.asname}" if alias.asname else alias.name
        bound = alias.asname or (alias.name if origin else alias.name.partition(".")[0])
        yield bound, f"{origin}:{alias.name}", origin, tail


def select(function: ast.stmt, selector: str) -> list[ast.stmt]:
    """The statements a selector names: all that match, or the one its index picks."""
    body = statements(function)
    found = [node for node in body if _matches(node, selector)]
    picked = re.fullmatch(r"(.+?)\[(-?\d+)\]", selector)
    if found or not picked:
        return found
    found = [node for node in body if _matches(node, picked[1])]
    index = int(picked[2])
    return [found[index]] if -len(found) <= index < len(found) else []


@cache
def _normal(expression: str) -> str:
    try:
        return ast.unparse(ast.parse(expression, mode="eval"))
    except SyntaxError:
        return ""


def _matches(node: ast.stmt, selector: str) -> bool:
    if selector in KINDS:
        return isinstance(node, KINDS[selector])
    want = _normal(selector.removeprefix("call "))
    if selector.startswith("call "):
        parts = [n for n in ast.iter_child_nodes(node) if isinstance(n, (ast.expr, ast.withitem))]
        calls = [n for part in parts for n in ast.walk(part) if isinstance(n, ast.Call)]
        return any(ast.unparse(call.func) == want for call in calls)
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign):
        targets = list(node.targets)
    elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        targets = [node.target]
    for target in tuple(targets):
        targets += target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
    return want in map(ast.unparse, targets)


def value_of(node: ast.stmt) -> ast.expr | None:
    """What the name `upstream` stands for: the statement's value, test, iterable or context."""
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return node.items[0].context_expr if len(node.items) == 1 else None
    return next((v for a in ("value", "test", "iter", "exc") if (v := getattr(node, a, None))), None)
