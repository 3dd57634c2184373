"""Creates `.venv` and installs the fork into it, if that is not done yet; then brings the composed tree up to date.

Usage: `python3 tools/install.py [EXTRA]`, where EXTRA is one of `EXTRAS`. Standard library only, since this runs
before anything is installed.
"""

import hashlib
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
LOG = VENV / "install.log"
STAMP = VENV / "fork-installed"

# Each holds the one before it, as the files in requirements/ do.
EXTRAS = ("", "quantize", "accuracy", "test", "dev")

# Lines of pip and of ours worth showing; a warning on top of them is not.
NEWS = ("fork:", "Collecting", "Requirement", "Building", "Installing", "Processing")

OLDEST, NEWEST = (3, 11), (3, 14)  # pyproject.toml's requires-python


def check_python():  # no annotations: older ones must get as far as here
    if not OLDEST <= sys.version_info[:2] <= NEWEST:
        sys.exit(
            f"{sys.executable} is Python {'.'.join(map(str, sys.version_info[:3]))}; the fork needs "
            f"{'.'.join(map(str, OLDEST))} to {'.'.join(map(str, NEWEST))}.\n"
            "Name another one, as in `make demo PYTHON=python3.12`."
        )


check_python()


class Progress:
    """One line that says what is being waited for: rewritten on a terminal, else a new one every ten seconds."""

    def __init__(self, what: str):
        self.what = what
        self.start = self.printed = time.monotonic()
        self.live = sys.stdout.isatty()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start

    def show(self, note: str = "") -> None:
        line = f"{self.what} … {self.seconds:.0f} s  {note}".rstrip()
        if self.live:
            print(f"\r\x1b[K{line[:78]}", end="", flush=True)
        elif time.monotonic() - self.printed >= 10:
            self.printed = time.monotonic()
            print(line[:120], flush=True)

    def clear(self) -> None:
        if self.live:
            print("\r\x1b[K", end="", flush=True)


def tail(log: Path, count: int) -> list[str]:
    """The last lines of a log that are not blank."""
    if not log.exists():
        return []
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, 2) - 500 * count))
        lines = file.read().decode(errors="replace").splitlines()
    return [line.rstrip() for line in lines if line.strip()][-count:]


def logged(what: str, *command: str | Path) -> None:
    """Runs a command with its output in the log; ends the program with the log's last lines when it fails."""
    progress = Progress(what)
    with LOG.open("a") as log:
        running = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            while running.poll() is None:
                progress.show(next((line for line in reversed(tail(LOG, 100)) if line.startswith(NEWS)), ""))
                time.sleep(0.2)
        except BaseException:
            running.terminate()
            running.wait()
            raise
        finally:
            progress.clear()
    if running.returncode:
        sys.exit("\n".join([*tail(LOG, 15), f"FAILED: {what}; the whole log is {LOG.relative_to(ROOT)}"]))


def key() -> str:
    """Changes whenever what is installed has to."""
    from tools.fork.base import choose_flavour

    total = hashlib.sha256(f"{ROOT} {sys.version_info[:2]} {choose_flavour()}".encode())
    for path in [ROOT / "pyproject.toml", ROOT / "setup.py", *sorted((ROOT / "requirements").glob("*.txt"))]:
        total.update(path.read_bytes())
    return total.hexdigest()[:16]


def install(extra: str) -> None:
    """Installs the fork with an extra, unless the stamp says that it is there."""
    python = VENV / "bin" / "python"
    want = key()
    have, _, level = STAMP.read_text().partition(" ") if STAMP.exists() else ("", "", "")
    if have != want or EXTRAS.index(level) < EXTRAS.index(extra) or not python.exists():
        extra = max(extra, level, key=EXTRAS.index)
        print(f"Installing the fork into .venv (a few minutes; log: {LOG.relative_to(ROOT)})", flush=True)
        VENV.mkdir(exist_ok=True)
        LOG.write_text("")
        STAMP.unlink(missing_ok=True)
        logged("creating .venv", sys.executable, "-m", "venv", VENV)
        logged("composing the source tree", python, ROOT / "fork", "sync")
        target = f".[{extra}]" if extra else "."
        # Compiling every module of every package would take as long as all the rest; Python does it on import.
        options = ["--no-input", "--no-compile", "--progress-bar=off"]
        logged("installing", python, "-m", "pip", "install", *options, "-e", target)
        STAMP.write_text(f"{want} {extra}")
    done = subprocess.run([python, ROOT / "fork", "sync"], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)


def main() -> None:
    sys.path.insert(0, str(ROOT))
    from tools.fork.parse import ForkError

    try:
        install(sys.argv[1] if len(sys.argv) > 1 else "")
    except ForkError as error:
        sys.exit(str(error))
    except KeyboardInterrupt:
        sys.exit("\nInterrupted; run it again to go on.")


if __name__ == "__main__":
    main()
