"""Serves a tiny quantised Kimi K3 and compares what it answers with an independent reference.

Run by `make demo`, inside `.venv`. The server and the client are the ones a user would take: `vllm serve` and the
`openai` package. Exits 0 only if every step succeeded, the comparison included, and no process is left.
"""

import argparse
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.fork.base import Fork  # noqa: E402
from tools.fork.tree import input_digest  # noqa: E402
from tools.install import Progress, tail  # noqa: E402

HERE = ROOT / ".demo"
VLLM = Path(sys.executable).with_name("vllm")

# max |Δ log-prob| between engine and reference, both in float32.
BOUND = 1e-3

TOKENS = 16
CANDIDATES = 20  # most likely tokens asked for at each position; vLLM's default limit

QUESTION = "How many layers of Kimi K3 attend to everything?"
# Long enough for three 64-token chunks of Kimi Delta Attention.
PROMPT = (
    "Kimi K3 mixes two kinds of attention: most layers keep a small state that they update token by token, and every "
    "fourth layer looks at the whole context through a compressed cache. The state is"
)

# What is served: prompt token ids, then for each generated position its token id and {token id: log-prob}.
Served = tuple[list[int], list[tuple[int, dict[int, float]]]]


class Failed(Exception):
    """A step did not succeed; the message is its row."""


class Server:
    """A server process in a session of its own, so that all it starts can be found again.

    Args:
        command: What to start.
        log: File that takes its output.
        variables: More environment variables.
    """

    def __init__(self, command: list[str], log: Path, variables: dict[str, str] | None = None):
        self.log = log
        self.scratch = tempfile.TemporaryDirectory(prefix="vllm-demo-")  # the server leaves its sockets behind
        quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}  # a demo talks to nobody
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env={**os.environ, **quiet, **(variables or {}), "TMPDIR": self.scratch.name},
                start_new_session=True,
            )

    def wait_for(self, url: str, timeout: float, progress: Progress) -> None:
        """Returns once `url` answers.

        Raises:
            Failed: The server ended, or the time is over.
        """
        while True:
            if self.process.poll() is not None:
                raise Failed(f"the server ended with status {self.process.returncode}")
            try:
                with urllib.request.urlopen(url, timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                if progress.seconds > timeout:
                    raise Failed(f"no answer within {timeout:.0f} s") from None
            progress.show("".join(tail(self.log, 1)))
            time.sleep(0.3)

    def left(self) -> list[int]:
        """Processes of the server's session that still run."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if entry.name.isdigit() and os.getsid(int(entry.name)) == self.process.pid:
                    state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                    found += [int(entry.name)] if state != "Z" else []
            except OSError:
                continue
        return found

    def wait_for_end(self, patience: float) -> list[int]:
        """What still runs when nothing does, or when the time is over."""
        end = time.monotonic() + patience
        while rest := self.left():
            if time.monotonic() >= end:
                break
            time.sleep(0.1)
        self.process.poll()
        return rest

    def stop(self, patience: float = 30) -> str:
        """Ends the server and all that it started.

        Raises:
            Failed: Something had to be killed.
        """
        ended = self.process.poll() is not None
        if not ended:
            self.process.terminate()
        rest = self.wait_for_end(patience)
        for pid in rest:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait_for_end(10)
        self.scratch.cleanup()
        if rest:
            raise Failed(f"{len(rest)} of its processes did not end within {patience:.0f} s and were killed")
        return "had ended; no process left" if ended else "no process left"


class Demo:
    """The steps in order, each a row of the table that is printed as they finish."""

    def __init__(self, options: argparse.Namespace):
        self.options = options
        self.flavour = Fork().flavour
        self.checkpoint = HERE / options.format
        self.server: Server | None = None
        self.answers: list[Served] = []
        self.url = ""

    def row(self, step: str, seconds: float, result: str) -> None:
        print(f"{step:<22} {seconds:>8.1f}  {result}", flush=True)

    def step(self, name: str, work: Callable[[Progress], str]) -> None:
        """Runs one step and prints its row, whatever becomes of it."""
        progress = Progress(name)
        progress.show()
        try:
            result = work(progress)
        except BaseException as error:
            why = "interrupted" if isinstance(error, KeyboardInterrupt) else f"FAILED: {error}"
            progress.clear()
            self.row(name, progress.seconds, why)
            raise
        progress.clear()
        self.row(name, progress.seconds, result)

    def run(self) -> int:
        print(f"{'step':<22} {'seconds':>8}  result")
        started = self.options.started or time.time()
        self.row("install", time.time() - started, f"vllm {version('vllm')} in {Path(sys.prefix).name}")
        status, evidence = 0, []
        try:
            self.step("write checkpoint", self.write)
            self.step("start server", self.start)
            self.step("chat", self.chat)
            self.step("completion", self.complete)
            self.step("compare", self.compare)
        except Failed:
            status = 1
            evidence = tail(self.server.log, 15) if self.server else []  # before the server's farewell
        except KeyboardInterrupt:
            status = 130
        finally:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            try:
                if self.server:
                    self.step("stop server", self.stop)
            except Failed:
                status = status or 1
        self.row("total", time.time() - started, "ok" if not status else "not ok")
        if evidence and self.server:
            print("\nLast lines of the server's log:", *evidence, sep="\n  ")
            print(f"The whole log is {self.server.log}")
        return status

    def write(self, progress: Progress) -> str:
        command = [VLLM, "checkpoint", "make-tiny", self.checkpoint, "--format", self.options.format, "--force"]
        HERE.mkdir(exist_ok=True)
        written, digest = HERE / f"{self.options.format}.written", input_digest(Fork())
        if written.exists() and written.read_text() == digest and self.checkpoint.exists():
            return f"{self.options.format}, still there"
        log = HERE / "checkpoint.log"
        with log.open("w") as file:
            done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT)
        if done.returncode:
            raise Failed("; ".join(tail(log, 3)))
        written.write_text(digest)
        size = sum(path.stat().st_size for path in self.checkpoint.glob("*.safetensors"))
        return f"{self.options.format}, {size / 1e6:.1f} MB"

    def start(self, progress: Progress) -> str:
        port = claim_port(self.options.port)
        command = [str(VLLM), "serve", str(self.checkpoint), "--host", "127.0.0.1", "--port", str(port)]
        # A tiny model needs little; by default the server takes nearly all memory for its cache.
        command += ["--kv-cache-memory-bytes", str(1 << 28)]
        if self.flavour == "cpu":
            command += ["--dtype", "float32"]
        self.server = Server(command + self.options.args, HERE / "server.log")
        url = f"http://127.0.0.1:{port}"
        self.server.wait_for(f"{url}/health", self.options.timeout, progress)
        self.url = f"{url}/v1"
        return self.url

    def ask(self, create: Callable[[Any], Callable[..., Any]], **request: Any) -> Any:
        import openai

        try:
            with openai.OpenAI(base_url=self.url, api_key="-", timeout=self.options.timeout, max_retries=0) as client:
                return create(client)(
                    model=str(self.checkpoint),
                    max_tokens=TOKENS,
                    temperature=0,
                    extra_body={"return_token_ids": True, "return_tokens_as_token_ids": True, "ignore_eos": True},
                    **request,
                )
        except openai.APIError as error:
            raise Failed(f"{type(error).__name__}: {error}"[:200]) from error

    def chat(self, progress: Progress) -> str:
        reply = self.ask(
            lambda client: client.chat.completions.create,
            messages=[{"role": "user", "content": QUESTION}],
            logprobs=True,
            top_logprobs=CANDIDATES,
        )
        choice = reply.choices[0]
        rows = [
            {token_id(item.token): item.logprob for item in [*place.top_logprobs, place]}
            for place in choice.logprobs.content
        ]
        return self.keep(reply.prompt_token_ids, choice.token_ids, rows)

    def complete(self, progress: Progress) -> str:
        reply = self.ask(lambda client: client.completions.create, prompt=PROMPT, logprobs=CANDIDATES)
        choice = reply.choices[0]
        rows = [{token_id(token): value for token, value in row.items()} for row in choice.logprobs.top_logprobs]
        return self.keep(choice.prompt_token_ids, choice.token_ids, rows)

    def keep(self, prompt: list[int], tokens: list[int], rows: list[dict[int, float]]) -> str:
        if len(tokens) != TOKENS or len(rows) != TOKENS:
            raise Failed(f"{len(tokens)} tokens and {len(rows)} rows of log-probs came back, not {TOKENS}")
        self.answers.append((prompt, list(zip(tokens, rows, strict=True))))
        return f"{len(prompt)} prompt tokens, {TOKENS} tokens back"

    def compare(self, progress: Progress) -> str:
        """Gives the reference the served tokens and compares each log-prob that was returned."""
        import torch

        from tests.models.kimi_k3 import reference

        torch.set_num_threads(1)  # many small operations: beside other work, two threads took 20 s instead of 0.3
        model = reference.load(self.checkpoint)
        differences = []
        for prompt, generated in self.answers:
            expected = model.logprobs(prompt + [token for token, _ in generated[:-1]])[len(prompt) - 1 :]
            for row, (_, served) in zip(expected, generated, strict=True):
                differences.append(row[list(served)] - torch.tensor(list(served.values())))
        delta = torch.cat(differences).abs()
        text = f"max |Δ log-prob| {delta.max():.1e} over {delta.numel()} values"
        if self.flavour != "cpu":
            return f"{text} (no bound: the server does not run in float32)"
        if not delta.max() <= BOUND:  # NaN too
            raise Failed(f"{text}, bound {BOUND:.0e}")
        return f"{text} (bound {BOUND:.0e})"

    def stop(self, progress: Progress) -> str:
        assert self.server
        return self.server.stop()


def token_id(text: str) -> int:
    """Reads `token_id:17`, as the server writes tokens on request."""
    return int(text.removeprefix("token_id:"))


def claim_port(wanted: int) -> int:
    """The port wanted, or with 0 any free one.

    Raises:
        Failed: Somebody listens there.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", wanted))
        except OSError as error:
            raise Failed(f"port {wanted}: {error.strerror}; choose another with --port, or leave it out") from error
        return probe.getsockname()[1]


def interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--format", default="nvfp4-modelopt", help="format of the checkpoint (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="port of the server (default: a free one)")
    parser.add_argument("--timeout", type=float, default=300, metavar="S", help="for the start and for each request")
    parser.add_argument("--args", type=shlex.split, default=[], metavar="'…'", help="more arguments for vllm serve")
    parser.add_argument("--started", type=float, help=argparse.SUPPRESS)  # seconds since the epoch, set by make
    options = parser.parse_args(arguments)
    os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1"
    signal.signal(signal.SIGTERM, interrupt)
    signal.signal(signal.SIGHUP, interrupt)
    return Demo(options).run()


if __name__ == "__main__":
    sys.exit(main())
