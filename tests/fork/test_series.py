"""Topics, the export as patches, and the comparison with another release."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fork.conftest import PLAIN, codes, write, write_wheel
from tools.fork.base import Fork
from tools.fork.cli import main
from tools.fork.parse import ForkError
from tools.fork.series import check_series, export
from tools.fork.tree import sync

OURS = {
    "vllm/calc.py": """
        import cmath


        # fork: add after area
        def volume(radius):
            return area(radius) * radius


        # fork: extend
        class Counter:
            def reset(self):
                self.total = cmath.pi
        """,
    "vllm/new/deep.py": 'VALUE = "ü"\n',
    "tests/new/test_deep.py": "def test_value(): ...\n",
    "tests/fork/test_own.py": "",
    "tests/conftest.py": "",
}


def topic(name: str, members: list[str], title: str = "[Core][Bugfix] A title") -> str:
    return f"""
[[topic]]
name = "{name}"
title = "{title}"
why = '''
Because of {name}, naïvely.
'''
upstream = "nothing yet"
remove-when = "never"
members = {members}
"""


SERIES = topic("counting", ["vllm/calc.py::Counter"]) + topic(
    "volumes", ["vllm/calc.py::volume", "vllm/new/", "tests/new/test_deep.py"], "[Model] Volumes"
)


def git(folder: Path, *arguments: str) -> str:
    settings = ["-c", "user.name=Somebody", "-c", "user.email=somebody@example.invalid"]
    return subprocess.run(["git", *settings, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def test_a_complete_series_passes(make_fork: Callable) -> None:
    fork = make_fork(OURS, series=SERIES)
    assert check_series(fork, fork.base()) == []


@pytest.mark.parametrize(
    ("series", "wanted"),
    [
        (SERIES.replace('"vllm/calc.py::volume", ', "").replace("'vllm/calc.py::volume', ", ""),
         "vllm/calc.py:4: SERIES  vllm/calc.py::volume belongs to 0 topics"),
        (SERIES.replace("'vllm/new/', ", ""), "vllm/new/deep.py:1: SERIES  vllm/new/deep.py belongs to 0 topics"),
        (SERIES + topic("more", ["vllm/calc.py"]), "vllm/calc.py:4: SERIES  vllm/calc.py::volume belongs to 2 topics"),
        (SERIES + topic("more", ["vllm/gone.py"]).replace("'", '"', 99).replace('"""', "'''"),
         "SERIES  topic more: there is no vllm/gone.py"),
    ],
)
def test_strays_and_empty_names_are_told(make_fork: Callable, series: str, wanted: str) -> None:
    fork = make_fork(OURS, series=series)
    assert wanted in "\n".join(map(str, check_series(fork, fork.base())))
    with pytest.raises(ForkError):  # its patches would not give the composed tree
        export(fork, fork.base())


def test_a_topic_without_all_fields_is_refused(make_fork: Callable) -> None:
    fork = make_fork(OURS, series=SERIES.replace('upstream = "nothing yet"\n', ""))
    with pytest.raises(ForkError) as caught:
        check_series(fork, fork.base())
    assert codes(caught.value) == ["SERIES"]


def apply(fork: Fork, patches: list[Path], folder: Path) -> Path:
    """Commits the pristine base in a new repository and applies the patches to it."""
    folder.mkdir()
    git(folder, "init", "--quiet")
    for path in (fork.base() / "vllm").rglob("*"):
        if path.is_file():
            write(folder, {})
            target = folder / path.relative_to(fork.base())
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message=base")
    git(folder, "am", "--quiet", "--keep-non-patch", *map(str, patches))
    return folder


def test_the_export_applied_to_the_base_is_the_composed_tree(make_fork: Callable, tmp_path: Path) -> None:
    fork = make_fork(OURS, series=SERIES)
    sync(fork)
    patches = export(fork, fork.base())
    assert [patch.name[:4] for patch in patches] == ["0001", "0002"]
    folder = apply(fork, patches, tmp_path / "applied")
    for top in ("vllm", "tests"):
        got = {p.relative_to(folder): p.read_bytes() for p in (folder / top).rglob("*") if p.is_file()}
        home = fork.composed if top == "vllm" else fork.root
        want = {p.relative_to(home): p.read_bytes() for p in (home / top).rglob("*") if p.is_file()}
        want = {p: data for p, data in want.items() if p.parts[:2] != ("tests", "fork") and p.name != "conftest.py"}
        assert got == want
    assert git(folder, "log", "--format=%s%n%b", "--reverse", "HEAD~2..") == (
        "[Core][Bugfix] A title\nBecause of counting, naïvely.\n\n[Model] Volumes\nBecause of volumes, naïvely.\n\n"
    )
    assert git(folder, "show", "--stat", "--format=", "HEAD~1").count("|") == 1
    assert "import cmath" in git(folder, "show", "HEAD~1") and "cmath" not in git(folder, "show", "HEAD", "--unified=0")
    assert not [patch for patch in patches if "Signed-off-by" in patch.read_text()]


def test_the_export_is_the_same_bytes_whatever_the_users_configuration(
    make_fork: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fork = make_fork(OURS, series=SERIES)
    first = {patch.name: patch.read_bytes() for patch in export(fork, fork.base())}
    write(tmp_path, {"gitconfig": "[format]\n\tsignOff = true\n\tnumbered = true\n[diff]\n\tnoprefix = true\n"
                                  "\talgorithm = histogram\n[core]\n\tautocrlf = true\n[user]\n\tname = Other\n"})
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "gitconfig"))
    monkeypatch.setenv("GIT_DIFF_OPTS", "--unified=9")
    monkeypatch.setenv("GIT_AUTHOR_DATE", "2030-01-01T00:00:00Z")
    assert first == {patch.name: patch.read_bytes() for patch in export(fork, fork.base())}


def test_one_topic_alone_and_an_unknown_one(make_fork: Callable) -> None:
    fork = make_fork(OURS, series=SERIES)
    [patch] = export(fork, fork.base(), "volumes")
    assert patch.relative_to(fork.root).as_posix() == "dist/volumes/0001-Model-Volumes.patch"
    assert "Subject: [Model] Volumes\n" in patch.read_text() and "cmath" not in patch.read_text()
    with pytest.raises(ForkError, match="counting, volumes"):
        export(fork, fork.base(), "none")


NEXT = {
    **PLAIN,
    "vllm/calc.py": """
        import math


        def area(radius):
            return math.tau * radius**2 / 2


        def volume(radius):
            return area(radius) * radius


        class Counter:
            def step(self, by=1):
                self.total = by
                return self.total
        """,
    "vllm/new/deep.py": "VALUE = 2\n",
    "vllm/same.py": "SAME = 1\n",
}
REBASED = {
    "vllm/calc.py": """
        # fork: edit {area}
        def area(radius):
            # fork: at start
            log(radius)


        def volume(radius):
            return area(radius) * radius


        # fork: extend
        class Counter:
            def reset(self): ...
        """,
    "vllm/new/deep.py": "VALUE = 1\n",
    "vllm/same.py": "SAME = 1\n",
    "vllm/other.py": "from vllm.old import X\n",
    "vllm/old.py": "# fork: append\nX = [2]\n",
}


def test_rebase_and_export_onto_another_release(
    make_fork: Callable, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    upstream = {**PLAIN, "vllm/old.py": "X = [1]\n"}
    fork = make_fork({path: text for path, text in REBASED.items() if path != "vllm/calc.py"}, upstream)
    monkeypatch.setattr("tools.fork.cli.Fork", lambda: Fork(fork.root, "cpu"))
    write_wheel(tmp_path / "wheels", NEXT, "2.0")
    write(fork.root, {"vllm/calc.py": REBASED["vllm/calc.py"].replace(" {area}", "")})
    assert main(["pin", "vllm/calc.py::area"]) == 0
    capsys.readouterr()
    assert main(["rebase", "2.0"]) == 1
    rows = [line.split() for line in capsys.readouterr().out.split("\n")[1:-2]]
    assert {(row[0], row[1]) for row in rows} == {
        ("DRIFT", "vllm/calc.py::area"),
        ("LANDED", "vllm/calc.py::volume"),
        ("OK", "vllm/calc.py::Counter.reset"),
        ("EXISTS", "vllm/new/deep.py"),
        ("LANDED", "vllm/same.py"),
        ("OK", "vllm/other.py"),
        ("NAME", "vllm/other.py"),
        ("GONE", "vllm/old.py::X"),
    }
    assert main(["rebase", "1.0"]) == 0
    for path in ("vllm/new/deep.py", "vllm/same.py", "vllm/other.py", "vllm/old.py"):
        (fork.root / path).unlink()
    write(fork.root, {"vllm/calc.py": "# fork: extend\nclass Counter:\n    def reset(self): ...\n",
                      "series.toml": topic("counting", ["vllm/calc.py"])})
    assert main(["export", "--onto", "2.0"]) == 0
    patch = (fork.root / "dist/series/0001-Core-Bugfix-A-title.patch").read_text()
    assert "def volume(radius)" not in patch and "+    def reset(self): ..." in patch
