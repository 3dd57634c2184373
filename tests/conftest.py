"""Guards: tests of vLLM run against the composed tree of this checkout, brought up to date, or not at all."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.fork.base import Fork
from tools.fork.parse import ForkError
from tools.fork.tree import shadowed, stale, sync

# Before torch is imported. Tests make many small operations: two threads beside other work, each waiting for the other,
# take up to seventy times as long as one. An engine's workers get the number that fits their cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def guard(fork: Fork) -> str:
    """Brings the composed tree up to date; why `import vllm` would still not test this checkout, if it would not."""
    try:
        sync(fork)
    except ForkError as error:
        return f"{error}\nvllm:1: STALE  sync failed as above: {stale(fork)}"
    return "\n".join(map(str, shadowed(fork)))


def names_only_the_composers_tests(arguments: Sequence[str]) -> bool:
    """Whether all paths among pytest's arguments lie in tests/fork, whose tests need no vllm."""
    paths = [path for argument in arguments if (path := Path(argument.partition("::")[0])).exists()]
    return bool(paths) and all(path.resolve().is_relative_to(Path(__file__).parent / "fork") for path in paths)


# On import, not in a hook: pytest calls none before it has read the conftest.py of a named folder or file as well.
if not names_only_the_composers_tests(sys.argv[1:]) and (found := guard(Fork())):
    print(found, file=sys.stderr)
    raise SystemExit(2)
