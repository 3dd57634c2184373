"""Runs mypy on the composed modules that hold lines of ours, and reports what it finds in those lines.

Upstream's own findings are dropped. Run by `make lint`.
"""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.fork.base import Fork  # noqa: E402
from tools.fork.tree import our_files, where  # noqa: E402


def main() -> int:
    fork = Fork()
    paths = [path for path in our_files(fork.root) if path.endswith(".py")]
    options = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache" / "composed")]
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", *options, *paths],
        cwd=fork.composed,
        capture_output=True,
        text=True,
    )
    if done.returncode > 1:
        print(done.stdout + done.stderr, end="")
        return done.returncode
    count = 0
    for line in done.stdout.splitlines():
        found = re.fullmatch(r"(vllm/[^:]+):(\d+): (\w+): (.*)", line)
        place = where(fork, found[1], int(found[2])) if found else ""
        if found and not place.endswith("upstream's file"):
            print(f"{place}: {found[3]}: {found[4]}")
            count += found[3] == "error"
    print(f"{count} errors in our lines ({len(paths)} modules)")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
