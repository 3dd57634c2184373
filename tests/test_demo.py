"""`make demo`: its server handling against stand-ins, and once the whole of it."""

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import demo, install

CHILD = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(60)"


@pytest.fixture
def start(tmp_path: Path):
    """Starts Python code as a server; nothing of it outlives the test."""
    servers: list[demo.Server] = []

    def run(code: str, until: str = "") -> demo.Server:
        server = demo.Server([sys.executable, "-u", "-c", code], tmp_path / "server.log")
        servers.append(server)
        end = time.monotonic() + 20
        while until not in server.log.read_text() and time.monotonic() < end:
            time.sleep(0.05)
        return server

    yield run
    for server in servers:
        if server.left():
            with pytest.raises(demo.Failed):
                server.stop(patience=0)


def test_a_server_that_dies_at_start_is_told_with_its_status(start) -> None:
    server = start("import sys; print('no such model'); sys.exit(3)")
    with pytest.raises(demo.Failed, match="ended with status 3"):
        server.wait_for("http://127.0.0.1:9/health", 20, install.Progress("start"))
    assert install.tail(server.log, 5) == ["no such model"]
    assert server.stop() == "had ended; no process left"


def test_a_server_that_never_answers_runs_into_the_limit(start) -> None:
    server = start("import time; time.sleep(60)")
    with pytest.raises(demo.Failed, match="no answer within 0 s"):
        server.wait_for("http://127.0.0.1:9/health", 0.4, install.Progress("start"))
    assert server.stop() == "no process left"
    assert not Path(server.scratch.name).exists()


def test_a_server_that_ignores_the_request_to_end_is_killed_and_told(start) -> None:
    server = start(CHILD, until="ready")
    with pytest.raises(demo.Failed, match="1 of its processes did not end within 1 s and were killed"):
        server.stop(patience=1)
    assert not server.left()


def test_a_worker_that_outlives_its_server_is_found_and_killed(start) -> None:
    server = start(f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {CHILD!r}])", until="ready")
    assert server.process.wait(20) == 0
    with pytest.raises(demo.Failed, match="1 of its processes"):
        server.stop(patience=1)
    assert not server.left()


def test_a_port_in_use_is_refused_before_anything_starts() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        with pytest.raises(demo.Failed, match="in use"):
            demo.claim_port(other.getsockname()[1])
    assert demo.claim_port(0) > 0


def test_installing_again_is_due_when_a_requirement_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyproject.toml", "setup.py", "requirements/cpu.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("torch\n")
    monkeypatch.setattr(install, "ROOT", tmp_path)
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    before = install.key()
    assert install.key() == before
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cuda")
    assert install.key() != before
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    (tmp_path / "requirements" / "cpu.txt").write_text("torch==2\n")
    assert install.key() != before


def test_an_old_python_is_told_how_to_name_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    with pytest.raises(SystemExit, match=r"is Python 3\.10\.4; the fork needs 3\.11 to 3\.14.*\n.*PYTHON="):
        install.check_python()


def test_the_oldest_and_newest_python_are_those_of_the_package() -> None:
    text = (install.ROOT / "pyproject.toml").read_text()
    low, high = re.search(r'requires-python = ">=3\.(\d+),<3\.(\d+)"', text).groups()
    assert ((3, int(low)), (3, int(high) - 1)) == (install.OLDEST, install.NEWEST)


@pytest.mark.timeout(600)
def test_the_demo_serves_and_agrees_with_the_reference() -> None:
    pytest.importorskip("modelopt")
    done = subprocess.run([sys.executable, demo.__file__], capture_output=True, text=True)
    print(done.stdout, done.stderr)
    assert done.returncode == 0
    for row in (r"compare .* max \|Δ log-prob\| .*bound", r"stop server .* no process left", r"total .* ok"):
        assert re.search(row, done.stdout)
