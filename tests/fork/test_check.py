"""Checks on the composed tree: copied lines, definition order, imported names, ruff's F rules."""

from collections.abc import Callable

import pytest

from tests.fork.conftest import PLAIN
from tools.fork.check import check

LONG = """
    def long_one(values):
        total = values.first + values.second
        factor = total * values.weight - 1
        result = compute(total, factor, values)
        return result + factor * total


    class Base:
        def run(self, layer, scale):
            return layer.weight * scale


    table = Base
    """
UPSTREAM = {**PLAIN, "vllm/long.py": LONG, "vllm/pkg/__init__.py": "", "vllm/pkg/inner.py": "VALUE = 1\n"}


def found(make_fork: Callable, ours: dict[str, str]) -> list[str]:
    fork = make_fork(ours, UPSTREAM)
    return [f"{p.path}:{p.line}: {p.code}" for p in check(fork, fork.base()) if not p.code.startswith("F")]


COPY = """
    def mine(values):
        \"\"\"A new name for the same lines.\"\"\"
        total = values.first + values.second
        factor = total * values.weight - 1

        result = compute(total, factor, values)
        return result
    """
SHARE = """
    def mine(values):
        total = values.first + values.second
        a_line_of_our_own(values, 1)
        factor = total * values.weight - 1
        another_line_of_our_own(values, 2)
        a_third_line_of_our_own(values, 3)
        return total - factor * 2
    """
FEW = """
    def mine(values):
        total = values.first + values.second
        a_line_of_our_own(values, 1)
        another_line_of_our_own(values, 2)
        a_third_line_of_our_own(values, 3)
        a_fourth_line_of_our_own(values, 4)
        return total - values * 2
    """
HEADER = """
    from vllm.long import Base


    class Mine(Base):
        def run(
            self,
            layer: torch.nn.Module,
            scale: torch.Tensor,
        ):
            return super().run(
                layer=layer,
                scale=scale,
            )
    """


@pytest.mark.parametrize("path", ["vllm/new.py", "vllm/calc.py"])
@pytest.mark.parametrize(
    ("text", "wanted"), [(COPY, 3), (SHARE, 1), (FEW, 0), (HEADER, 0)], ids=["run", "share", "few", "header"]
)
def test_lines_of_upstreams_are_refused(make_fork: Callable, path: str, text: str, wanted: int) -> None:
    assert found(make_fork, {path: text}) == ([f"{path}:{wanted}: COPIED"] if wanted else [])


def test_an_edit_that_quotes_upstream_is_refused(make_fork: Callable) -> None:
    body = "\n".join("    " + line for line in COPY.strip("\n").split("\n")[2:])
    ours = f"# fork: edit\ndef area(radius):\n    # fork: at start\n{body}\n"
    fork = make_fork({}, UPSTREAM)
    from tests.fork.conftest import write
    from tools.fork.parse import Source

    there = Source("vllm/calc.py", (fork.base() / "vllm/calc.py").read_bytes())
    write(fork.root, {"vllm/calc.py": ours.replace("edit", f"edit {there.pin(there.find('area')[0])}")})
    assert [p.code for p in check(fork, fork.base())][0] == "COPIED"


@pytest.mark.parametrize(
    ("ours", "wanted"),
    [
        ("# fork: extend bases\nclass Base(Ours): ...\n\n\nclass Ours: ...\n", ["vllm/long.py:2: ORDER"]),
        ("# fork: extend bases\nclass Base(Ours): ...\n\n\n# fork: add after long_one\nclass Ours: ...\n", []),
        ("# fork: add after long_one\ndef ours(x=table): ...\n", ["vllm/long.py:2: ORDER"]),
        ("# fork: add after long_one\ndef ours(x: Base): ...\n", ["vllm/long.py:2: ORDER"]),
        ("# fork: add after long_one\nclass New:\n    x = table\n", ["vllm/long.py:3: ORDER"]),
        ("# fork: add after long_one\ndef ours():\n    return table\n", []),
        ("# fork: add after long_one\nours = lambda: table\n", []),
        ("# fork: extend\nclass Base:\n    def a(self): ...\n\n    b = a\n", []),
    ],
)
def test_definitions_stand_above_what_needs_them_at_once(make_fork: Callable, ours: str, wanted: list[str]) -> None:
    assert found(make_fork, {"vllm/long.py": ours}) == wanted


def test_imports_from_vllm_find_what_they_name(make_fork: Callable) -> None:
    ours = """
        from vllm.calc import Counter, missing
        from vllm.new import own, wanting
        from vllm.nowhere import x
        from vllm.pkg import inner
        from vllm.pkg.inner import VALUE
        from vllm.pkg.outer import VALUE
        """
    assert found(make_fork, {"vllm/use.py": ours, "vllm/new.py": "own = 1\n"}) == [
        f"vllm/use.py:{line}: NAME" for line in (1, 2, 3, 6)
    ]


def test_ruff_finds_undefined_and_unused_names(make_fork: Callable) -> None:
    pytest.importorskip("ruff")
    fork = make_fork({"vllm/calc.py": "import os\n\n\ndef ours():\n    os = nothing\n    return 1\n"}, UPSTREAM)
    assert {(p.code, p.line) for p in check(fork, fork.base())} >= {("F821", 5)}
