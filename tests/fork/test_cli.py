"""What the commands print and write."""

from collections.abc import Callable

import pytest

from tools.fork.base import Fork
from tools.fork.cli import main

OURS = {
    "vllm/calc.py": """
        # fork: extend
        class Counter:
            # fork: edit
            def step(self):
                # fork: at start
                self.calls += 1
        """
}


@pytest.fixture
def fork(make_fork: Callable, monkeypatch: pytest.MonkeyPatch) -> Fork:
    fork = make_fork(OURS)
    monkeypatch.setattr("tools.fork.cli.Fork", lambda: Fork(fork.root, "cpu"))
    return fork


def test_pin_then_sync_show_and_where(fork: Fork, capsys: pytest.CaptureFixture) -> None:
    assert main(["sync"]) == 1
    assert "vllm/calc.py:3: FORM  Counter.step: edit needs a pin" in capsys.readouterr().err
    assert main(["pin", "vllm/calc.py::Counter.step"]) == 0
    assert "Counter.step: no pin -> " in capsys.readouterr().out
    assert main(["sync"]) == 0
    assert capsys.readouterr().out == "fork: cpu, 4 files written\n"
    assert main(["sync"]) == 0
    assert capsys.readouterr().out == "fork: cpu, nothing changed\n"
    assert main(["show", "vllm/calc.py::Counter.step"]) == 0
    text = capsys.readouterr().out
    assert "--- base, vllm/calc.py:9, pin " in text and "--- ours, vllm/calc.py:4, pin " in text
    assert "--- composed, vllm/calc.py:9, pin " in text and "\ndef step(self, by=1):\n    self.calls += 1\n    self.total = by" in text
    assert main(["show", "vllm/calc.py"]) == 0
    text = capsys.readouterr().out
    assert "  area\n" in text and "  Counter.step\n" in text and "+        self.calls += 1\n" in text
    assert main(["where", f"{fork.composed}/vllm/calc.py:10"]) == 0
    assert capsys.readouterr().out == "vllm/calc.py:6\n"


def test_pin_prints_what_changed_since(fork: Fork, capsys: pytest.CaptureFixture) -> None:
    main(["pin", "vllm/calc.py"])
    other = fork.home / "base/cpu-0.9/vllm/calc.py"
    other.parent.mkdir(parents=True)
    other.write_bytes((fork.base() / "vllm/calc.py").read_bytes())
    place = fork.base() / "vllm/calc.py"
    place.chmod(0o644)
    place.write_text(place.read_text().replace("= by", "= by + 0"))
    capsys.readouterr()
    assert main(["sync"]) == 1
    assert "DRIFT  Counter.step" in capsys.readouterr().err
    assert main(["pin", "vllm/calc.py"]) == 0
    assert "-    self.total = by\n+    self.total = by + 0\n" in capsys.readouterr().out
    assert main(["sync"]) == 0


def test_check_writes_nothing(fork: Fork, capsys: pytest.CaptureFixture) -> None:
    main(["pin", "vllm/calc.py"])
    assert main(["check"]) == 1
    assert "SERIES  vllm/calc.py::Counter.step belongs to 0 topics" in capsys.readouterr().err
    assert not fork.composed.exists()


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        (["show", "vllm/none.py"], "GONE"),
        (["show", "vllm/calc.py::none"], "./fork show vllm/calc.py"),
        (["pin", "vllm/data.json"], "GONE"),
        (["pin", "vllm/calc.py::none"], "GONE"),
        (["where", "nonsense"], "no FILE:LINE"),
    ],
)
def test_a_wrong_argument_is_answered_in_one_message(
    fork: Fork, capsys: pytest.CaptureFixture, arguments: list[str], wanted: str
) -> None:
    assert main(arguments) == 1
    assert wanted in capsys.readouterr().err
