# SPDX-License-Identifier: Apache-2.0
"""Programs that run Triton kernels in its interpreter, on CPU tensors."""

import json
import os
import subprocess
import sys
from pathlib import Path


def run_interpreted(program: Path) -> dict[str, float]:
    """Run it in a process of its own; the JSON object on the last line it prints.

    The interpreter is chosen when triton is first imported, so no other process will do.
    """
    run = subprocess.run(
        [sys.executable, str(program)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout.splitlines()[-1])
