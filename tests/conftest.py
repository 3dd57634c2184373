"""Guards: tests of vLLM run against the composed tree of this checkout, brought up to date, or not at all."""

import pytest

from tools.fork.base import Fork
from tools.fork.parse import ForkError
from tools.fork.tree import shadowed, stale, sync


def guard(fork: Fork) -> str:
    """Brings the composed tree up to date; why `import vllm` would still not test this checkout, if it would not."""
    try:
        sync(fork)
    except ForkError as error:
        return f"{error}\nvllm:1: STALE  sync failed as above: {stale(fork)}"
    return "\n".join(map(str, shadowed(fork)))


def pytest_configure(config: pytest.Config) -> None:
    """Applies the guards before anything imports vllm; the composer's own tests need no vllm."""
    if not all("tests/fork" in str(argument) for argument in config.args) and (found := guard(Fork())):
        pytest.exit(found, returncode=2)
