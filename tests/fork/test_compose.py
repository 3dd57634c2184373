"""What each directive does to upstream's text."""

from collections.abc import Callable

import pytest

from tests.fork.conftest import clean, compose_source
from tools.fork.parse import Source

BASE = """
    # upstream's own head
    import os

    from vllm.other import alpha

    LIMIT = 3


    class Model(Base):
        size = 1

        def forward(self, x):
            \"\"\"Doc.\"\"\"
            y = self.gate(x)
            if y is None:
                return x
            return y

        def other(self):
            return os.getcwd(), alpha


    def helper():
        return LIMIT
    """


def added(base: str, composed: str) -> list[str]:
    """Lines of the composed text that upstream's has not."""
    return [line for line in composed.split("\n") if line and line not in clean(base).split("\n")]


def test_an_empty_amendment_changes_no_byte(compose: Callable) -> None:
    assert compose(BASE, '"""Nothing."""\n') == clean(BASE)


def test_add_stands_at_the_end_by_default(compose: Callable) -> None:
    text = compose(BASE, "# why\ndef ours():\n    return 1\n")
    assert text == clean(BASE) + "\n\n# why\ndef ours():\n    return 1\n"


def test_add_after_a_member_keeps_blank_lines(compose: Callable) -> None:
    text = compose(BASE, "# fork: add after LIMIT\nOURS = 4\n\n\n# fork: add after OURS\nMORE = 5\n")
    assert "LIMIT = 3\nOURS = 4\nMORE = 5\n\n\nclass" in text
    text = compose(BASE, "# fork: add after Model\ndef ours(): ...\n")
    assert "alpha\n\n\ndef ours(): ...\n\n\ndef helper" in text


def test_add_stands_before_the_main_guard(compose: Callable) -> None:
    text = compose('x = 1\n\n\nif __name__ == "__main__":\n    print(x)\n', "def ours(): ...\n")
    assert text == 'x = 1\n\n\ndef ours(): ...\n\n\nif __name__ == "__main__":\n    print(x)\n'


def test_a_base_without_final_newline_gets_one(compose: Callable) -> None:
    assert compose("x = 1", "Y = 2\n") == "x = 1\nY = 2\n"


def test_extend_puts_members_into_the_class(compose: Callable) -> None:
    ours = """
        # fork: extend
        class Model:
            \"\"\"Dropped.\"\"\"

            # fork: add after size
            ours = 2

            def more(self):
                return self.ours
        """
    text = compose(BASE, ours)
    assert "    size = 1\n    ours = 2\n\n    def forward" in text
    assert "alpha\n\n    def more(self):\n        return self.ours\n\n\ndef helper" in text
    assert "Dropped" not in text


def test_extend_bases_sets_the_base_list(compose: Callable) -> None:
    ours = "# fork: extend bases\nclass Model(Base, Mixin, metaclass=Meta):\n    pass\n"
    assert "class Model(Base, Mixin, metaclass=Meta):\n    size" in compose(BASE, ours)
    assert "class A(B): ...\n" in compose("class A(\n    C,  # a: b\n): ...\n", "# fork: extend bases\nclass A(B): ...\n")
    assert "class A(B[int]):  # note\n" in compose("class A:  # note\n    x = 1\n",
                                                   "# fork: extend bases\nclass A(B[int]): ...\n")


def test_nested_classes_are_reached(compose: Callable) -> None:
    base = "class A:\n    class B:\n        x = 1\n\n    y = 2\n"
    ours = "# fork: extend\nclass A:\n    # fork: extend\n    class B:\n        z = 3\n"
    assert compose(base, ours) == "class A:\n    class B:\n        x = 1\n        z = 3\n\n    y = 2\n"


def test_replace_takes_decorators_from_ours(compose: Callable) -> None:
    base = "class A:\n    # kept\n    @old\n    @older\n    def f(self):\n        return 1\n"
    ours = "# fork: extend\nclass A:\n    # fork: replace PIN\n    @new\n    def f(self):\n        return 2\n"
    assert compose(base, ours, "A.f") == "class A:\n    # kept\n    @new\n    def f(self):\n        return 2\n"


def test_replace_an_assignment_and_a_class(compose: Callable) -> None:
    assert "LIMIT = 9\n\n\nclass" in compose(BASE, "# fork: replace PIN\nLIMIT = 9\n", "LIMIT")
    assert "class Model:\n    pass\n\n\ndef helper" in compose(
        BASE, "# fork: replace PIN\nclass Model:\n    pass\n", "Model"
    )


def test_property_setter_and_overload_are_members_of_their_own(compose: Callable) -> None:
    base = """
        class A:
            @property
            def x(self):
                return self._x

            @x.setter
            def x(self, value):
                self._x = value

            @overload
            def f(self, a: int): ...
            @overload
            def f(self, a: str): ...
            def f(self, a):
                return a
        """
    there = Source("vllm/a.py", clean(base).encode())
    assert [m.key for m in there.members(there.scope(("A",)) or [])] == ["x", "x.setter", "f.overload", "f.overload", "f"]
    ours = """
        # fork: extend
        class A:
            # fork: edit PIN
            @x.setter
            def x(self, value):
                # fork: at start
                check(value)

            # fork: add after f
            def g(self): ...
        """
    text = compose(base, ours, "A.x.setter")
    assert "def x(self, value):\n        check(value)\n        self._x = value\n" in text
    assert text.endswith("return a\n\n    def g(self): ...\n")
    second = there.pin(there.find("A.f.overload")[1])
    ours = f"# fork: extend\nclass A:\n    # fork: replace {second}\n    @overload\n    def f(self, a: bytes): ...\n"
    assert "a: int): ...\n    @overload\n    def f(self, a: bytes): ...\n    def f(self, a)" in compose(base, ours)


def test_a_member_under_a_top_level_if_is_found_and_moved_to_its_indentation(compose: Callable) -> None:
    base = "if FLAG:\n    def f():\n        return 1\nelse:\n    def f():\n        return 2\n"
    there = Source("vllm/a.py", base.encode())
    ours = f'# fork: replace {there.pin(there.find("f")[1])}\ndef f():\n    text = f"""\nkept {{f()}}\n"""\n    return text\n'
    assert compose(base, ours) == (
        'if FLAG:\n    def f():\n        return 1\nelse:\n    def f():\n        text = f"""\nkept {f()}\n"""\n        return text\n'
    )


@pytest.mark.parametrize(
    ("base", "ours", "wanted"),
    [
        ("X = [1, 2]\n", "X = [3, 4]\n", "X = [1, 2, 3, 4]\n"),
        ("X = (1,)\n", "X = (3,)\n", "X = (1, 3,)\n"),
        ("X = {1}\n", "X = {3}\n", "X = {1, 3}\n"),
        ("X = []\n", "X = [3]\n", "X = [3]\n"),
        ('X: dict = {\n    "a": 1,  # one\n}\n', 'X = {"b": f(2)}\n', 'X: dict = {\n    "a": 1,  # one\n    "b": f(2),\n}\n'),
        ("X = {\n    **a,\n}\n", "X = {1: 2}\n", "X = {\n    **a,\n    1: 2,\n}\n"),
        ('X = Literal["a", "b"]\n', 'X = Literal["c", "d"]\n', 'X = Literal["a", "b", "c", "d"]\n'),
        ("X = frozenset([1])\n", "X = frozenset([2])\n", "X = frozenset([1, 2])\n"),
    ],
)
def test_append_joins_displays(compose: Callable, base: str, ours: str, wanted: str) -> None:
    assert compose(base, "# fork: append\n" + ours) == wanted


EDITED = """
    def f(a, b):
        \"\"\"Doc.\"\"\"
        x = a
        # about the loop
        for i in b:
            x, y = g(i), 1
        if x > 1:
            return x
        elif x:
            x += 1
        with lock():
            self.call(x)
        raise ValueError(
            x,
        )
    """


def edit(body: str, header: str = "a, x, upstream") -> str:
    body = "\n".join("    " + line for line in clean(body).rstrip().split("\n"))
    return f"# fork: edit PIN\ndef f({header}):\n{body}\n"


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        ("# fork: at start\nlog()", '    """Doc."""\n    log()\n    x = a\n'),
        ("# fork: at end\nlog()", "        x,\n    )\n    log()\n"),
        ("# fork: before for\nlog()", "    x = a\n    log()\n    # about the loop\n    for i in b:\n"),
        ("# fork: after x[0]\nlog()\nlog(2)", "    x = a\n    log()\n    log(2)\n    # about"),
        ("# fork: after x[1]\nlog()", "        x, y = g(i), 1\n        log()\n"),
        ("# fork: after y\nlog()", "        x, y = g(i), 1\n        log()\n"),
        ("# fork: before x[-1]\nlog()", "    elif x:\n        log()\n        x += 1\n"),
        ("# fork: before call self.call\nlog()", "    with lock():\n        log()\n        self.call(x)\n"),
        ("# fork: before call lock\nlog()", "    log()\n    with lock():\n"),
        ("# fork: instead-of return\nreturn upstream + 1", "        return x + 1\n    elif"),
        ("# fork: instead-of x[0]\nx = -upstream", "    x = -a\n    # about"),
        ("# fork: instead-of raise\nlog(upstream)\nraise upstream",
         "    log(ValueError(\n        x,\n    ))\n    raise ValueError(\n        x,\n    )\n"),
        ("# fork: instead-of if[0]\nif upstream or a:\n    ...", "    if (x > 1) or a:\n        return x\n    elif x:\n"),
        ("# fork: instead-of if[1]\nif not upstream:\n    ...", "    elif not x:\n        x += 1\n"),
        ("# fork: instead-of for\nfor i in sorted(upstream):\n    ...", "    for i in sorted(b):\n        x, y"),
        ("# fork: instead-of with\nwith both(upstream):\n    ...", "    with both(lock()):\n        self.call(x)\n"),
        ("# fork: instead-of for\nwork()", "    # about the loop\n    work()\n    if x > 1:\n"),
        ("# fork: drop for\n...", "    x = a\n    if x > 1:\n"),
        ("# fork: drop x[0]\n# fork: at end\nlog()", '    """Doc."""\n    # about the loop\n'),
    ],
)
def test_edit_changes_single_statements(compose: Callable, body: str, wanted: str) -> None:
    assert wanted in compose(EDITED, edit(body), "f")


def test_statements_at_the_end_of_a_module(compose: Callable) -> None:
    ours = "from vllm.other import here\n\n# fork: at end\n# why\nif here():\n    A = 2\n\n# fork: at end\nlog()\n"
    composed = compose("import os\n\nA = 1\n", ours)
    assert composed.endswith("A = 1\n\n# why\nif here():\n    A = 2\n\nlog()\n")
    assert "from vllm.other import here\n" in composed


def test_upstreams_value_is_bracketed_where_it_must_be(compose: Callable) -> None:
    base = "def f(a, b):\n    x = a or b\n    y = a, b\n    return (a\n            .b())\n"
    ours = edit("# fork: instead-of x\nx = g(1) and upstream\n# fork: instead-of y\ny = g(upstream)\n"
                "# fork: instead-of return\nreturn upstream")
    text = compose(base, ours, "f")
    assert "x = g(1) and (a or b)\n    y = g((a, b))\n    return (a\n            .b())\n" in text


def test_several_edits_of_one_function(compose: Callable) -> None:
    ours = edit("# fork: at start\nlog(a)\n# fork: instead-of return\nreturn -upstream", "a, upstream")
    text = compose("async def f(a):\n    return a\n", ours, "f")
    assert text == "async def f(a):\n    log(a)\n    return -a\n"


def test_strings_keep_their_tabs_and_blanks(compose: Callable) -> None:
    ours = 'class New:\n    def f(self):\n        return """\n\ta\n    b\\\n  """\n'
    assert compose("if X:\n    pass\n", ours).endswith(ours)
    base = 'class A:\n\tx = """\n\ttab"""\n'
    assert compose(base, '# fork: extend\nclass A:\n    y = """\n    a\tb"""\n') == base + '\ty = """\n    a\tb"""\n'


def test_line_ends_and_non_ascii_are_upstreams(compose: Callable) -> None:
    base = 'NAME = "prüfung", 1\r\n\r\n\r\ndef f(ß):\r\n    return "ü", ß  # ä\r\n'
    there = Source("vllm/a.py", base.encode())
    ours = f'# fork: edit {there.pin(there.find("f")[0])}\ndef f(upstream):\n    # fork: instead-of return\n    return "é", upstream\n'
    done = compose_source(base, ours)
    assert done.text == base.replace('return "ü", ß  # ä', 'return "é", ("ü", ß)')
    assert compose(base, "# fork: append\nNAME = 'ñ',\n").startswith("NAME = \"prüfung\", 1, 'ñ'\r\n")


def test_pins_ignore_place_and_trailing_blanks_but_not_decorators() -> None:
    def pin(text: str, name: str) -> str:
        there = Source("vllm/a.py", text.encode())
        return there.pin(there.find(name)[0])

    plain = pin("def f():\n    return 1\n", "f")
    assert plain == pin("# a comment\ndef f():\n    return 1   \r\n", "f")
    assert plain == pin("class A:\n    x = 1\n\n    def f():\n        return 1\n", "A.f")
    assert plain != pin("@cache\ndef f():\n    return 1\n", "f")


IMPORTS = """
    from __future__ import annotations

    import os
    from typing import TYPE_CHECKING

    from vllm.b import beta  # noqa: F401
    from vllm.c import Gamma

    if TYPE_CHECKING:
        from vllm.t import T


    def f(x: T):
        return os.sep, Gamma
    """


def test_imports_are_merged_where_they_sort_if_used(compose: Callable) -> None:
    ours = """
        import math
        from typing import TYPE_CHECKING

        from vllm.a import f
        from vllm.b import other
        from vllm.c import ALPHA, Gamma, gamma
        from vllm.d import unused

        if TYPE_CHECKING:
            from vllm.t import U


        def ours(u: U):
            return math.pi, other, ALPHA, gamma, Gamma, f
        """
    text = compose(IMPORTS, ours)
    assert "import os\nimport math\n" in text
    assert "from vllm.c import ALPHA, Gamma, gamma\n" in text
    assert "from vllm.b import beta  # noqa: F401\nfrom vllm.b import other\n" in text
    assert "    from vllm.t import T, U\n" in text
    assert "vllm.d" not in text and "vllm.a" not in text


def test_long_imports_are_wrapped_and_dead_ones_dropped(compose: Callable) -> None:
    ours = """
        from vllm.c import a_name_of_quite_some_length, another_name_of_still_greater_length_as_well


        # fork: replace PIN
        def f(x):
            return a_name_of_quite_some_length, another_name_of_still_greater_length_as_well
        """
    text = compose(IMPORTS, ours, "f")
    assert "import os" not in text and "Gamma" not in text and "beta" in text
    assert "from vllm.c import (\n    a_name_of_quite_some_length,\n    another_name_of_still_greater_length_as_well,\n)\n" in text


def test_the_map_tells_our_lines_from_upstreams() -> None:
    base = "x = 1\n\n\ndef f():\n    return 1\n"
    done = compose_source(base, "from m import g\n\n\n# fork: edit PIN\ndef f(upstream):\n    # fork: instead-of return\n"
                                "    return g(\n        upstream)\n", "f")
    assert done.text == "x = 1\nfrom m import g\n\n\ndef f():\n    return g(\n        1)\n"
    assert done.runs == [[1, 1, 0, 1], [2, 1, 1, 1], [3, 3, 0, 2], [6, 2, 1, 7]]
