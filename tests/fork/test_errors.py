"""Every finding of the composer: its code, its line, and that it says what to do."""

from collections.abc import Callable

import pytest

from tests.fork.conftest import codes
from tools.fork.parse import ForkError

BASE = """
    import os

    ITEMS = [1, 2]


    class A:
        x = 1

        def f(self, a, /):
            if a: return os
            if a > 1:
                raise
            elif a:
                return 2
            return a


    if os:
        def twice():
            return 1
    else:
        def twice():
            return 1


    def one(): return 1
    """


@pytest.mark.parametrize(
    ("ours", "pinned", "code", "line"),
    [
        ("# fork: extend\nclass A:\n    # fork: replace 000000000000\n    def f(self): ...\n", "", "DRIFT", 3),
        ("# fork: extend\nclass A:\n    # fork: edit 000000000000\n    def f(self): ...\n", "", "DRIFT", 3),
        ("# fork: extend\nclass B:\n    pass\n", "", "GONE", 1),
        ("# fork: extend\nclass A:\n    # fork: replace 000000000000\n    def g(self): ...\n", "", "GONE", 3),
        ("# fork: append\nOTHER = [1]\n", "", "GONE", 1),
        ("# fork: add after nothing\nX = 1\n", "", "GONE", 1),
        ("def twice():\n    return 2\n", "", "EXISTS", 1),
        ("ITEMS = [1, 2]\n", "", "LANDED", 1),
        ("# fork: append\nITEMS = [2]\n", "", "EXISTS", 1),
        ("# fork: append\nITEMS = (3,)\n", "", "FORM", 1),
        ("# fork: replace PIN\ndef twice():\n    return 2\n", "twice", "ANCHOR", 1),
        ("# fork: replace PIN\ndef one():\n    return 2\n", "one", "", 0),
        ("# fork: edit PIN\ndef one():\n    # fork: at start\n    log()\n", "one", "ANCHOR", 1),
        ("# fork: edit\ndef one():\n    # fork: at start\n    log()\n", "", "FORM", 1),
        ("# fork: edit PIN\ndef one():\n    log()\n", "one", "FORM", 1),
        ("# fork: edit PIN\ndef one():\n    # fork: at start\n    ...\n", "one", "FORM", 3),
        ("# fork: edit PIN\ndef one():\n    log()\n    # fork: at start\n    log()\n", "one", "FORM", 3),
        ("# fork: edit PIN\ndef one():\n    # fork: at start\n    if x:\n        # fork: at end\n        y\n", "one", "FORM", 4),
        ("# fork: edit PIN\ndef one(unknown):\n    # fork: at start\n    log()\n", "one", "NAME", 2),
        ("# fork: edit PIN\ndef one():\n    # fork: near return\n    log()\n", "one", "FORM", 3),
        ("# fork: extend\nclass A(B):\n    pass\n", "", "FORM", 1),
        ("# fork: extend\ndef one(): ...\n", "", "FORM", 1),
        ("# fork: edit 000000000000\nclass A: ...\n", "", "FORM", 1),
        ("# fork: append\ndef one(): ...\n", "", "FORM", 1),
        ("# fork: alter\ndef one(): ...\n", "", "FORM", 1),
        ("# fork: add\n# fork: add\nX = 1\n", "", "FORM", 1),
        ("X = 1  # fork: add\n", "", "FORM", 1),
        ("# fork: add\n\nX = 1\n", "", "FORM", 1),
        ("print(1)\n", "", "FORM", 1),
        ("# fork: extend\nclass A:\n    # fork: at end\n    print(1)\n", "", "FORM", 4),
        ("# fork: edit PIN\ndef one():\n    # fork: drop return\n    log()\n", "one", "FORM", 3),
        ("# fork: edit PIN\ndef one():\n    # fork: drop raise\n    ...\n", "one", "ANCHOR", 3),
        ("def f(:\n", "", "FORM", 1),
        ("from __future__ import annotations\nX: annotations = 1\n", "", "FORM", 1),
        ("from vllm.a import missing\n", "", "NAME", 1),
        ("from other import A\nX = A\n", "", "NAME", 1),
        ("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from vllm.t import T\nX: T = 1\n", "", "FORM", 3),
    ],
)
def test_what_is_wrong_is_named(compose: Callable, ours: str, pinned: str, code: str, line: int) -> None:
    if not code:
        compose(BASE, ours, pinned)
        return
    with pytest.raises(ForkError) as caught:
        compose(BASE, ours, pinned)
    assert codes(caught.value) == [code]
    assert caught.value.problems[0].line == line
    assert str(caught.value).startswith(f"vllm/a.py:{line}: {code}  ")


@pytest.mark.parametrize(
    ("body", "code"),
    [
        ("# fork: after return\nlog()", "ANCHOR"),  # three of them
        ("# fork: after return[7]\nlog()", "ANCHOR"),
        ("# fork: after nothing\nlog()", "ANCHOR"),
        ("# fork: after call g\nlog()", "ANCHOR"),
        ("# fork: after not a selector\nlog()", "ANCHOR"),
        ("# fork: after return[0]\nlog()", "ANCHOR"),  # shares its line with the if
        ("# fork: before if[2]\nlog()", "ANCHOR"),  # an elif
        ("# fork: instead-of if[2]\nlog()", "ANCHOR"),
        ("# fork: instead-of if[1]\nwhile upstream:\n    ...", "ANCHOR"),
        ("# fork: instead-of return[2]\nreturn 5\n# fork: instead-of return[-1]\nreturn 6", "ANCHOR"),
        ("# fork: instead-of raise\nlog(upstream)", "ANCHOR"),  # a bare one has no value
        ("# fork: instead-of return[2]\nreturn f'{upstream}'", "FORM"),
    ],
)
def test_selectors_that_do_not_name_one_statement(compose: Callable, body: str, code: str) -> None:
    lines = "\n".join("        " + line for line in body.split("\n"))
    with pytest.raises(ForkError) as caught:
        compose(BASE, f"# fork: extend\nclass A:\n    # fork: edit PIN\n    def f(self, a):\n{lines}\n", "A.f")
    assert codes(caught.value) == [code]


@pytest.mark.parametrize("path", ["vllm/__init__.py", "vllm/_version.py", "vllm/platforms/__init__.py"])
def test_the_package_root_version_and_platforms_cannot_be_amended(compose: Callable, path: str) -> None:
    with pytest.raises(ForkError, match="cannot be amended"):
        compose(BASE, "X = 1\n", path=path)


def test_all_findings_of_a_file_come_at_once(compose: Callable) -> None:
    with pytest.raises(ForkError) as caught:
        compose(BASE, "# fork: append\nITEMS = [1]\n\n\n# fork: replace 000000000000\ndef gone(): ...\n")
    assert codes(caught.value) == ["EXISTS", "GONE"]


def test_a_drift_message_says_sizes_and_the_way_out(compose: Callable) -> None:
    with pytest.raises(ForkError) as caught:
        compose(BASE, "# fork: replace 000000000000\ndef one():\n    return 2\n")
    text = str(caught.value)
    assert "upstream 1 lines, pin " in text and "ours 2 lines" in text and "./fork pin vllm/a.py::one" in text
