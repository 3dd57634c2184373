# SPDX-License-Identifier: Apache-2.0

import os

# fork: append
environment_variables = {
    # Load what cannot be served exactly, with a warning for each thing let through
    # (vllm/checkpoint/strictness.py). For research.
    "VLLM_ALLOW_INEXACT_CHECKPOINT": lambda: bool(int(os.getenv("VLLM_ALLOW_INEXACT_CHECKPOINT", "0"))),
}
