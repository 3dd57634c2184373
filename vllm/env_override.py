# SPDX-License-Identifier: Apache-2.0
"""Lets `vllm checkpoint` start without a compiler."""

import os
import sys


# fork: edit 9253c979fdbe
def _patch_inductor_fallback_allow_list():
    # fork: at start
    # The patch imports all of Inductor: three seconds of processor time, more than reading the headers of 1.6 TB. The
    # checkpoint tools compile nothing.
    ours = os.path.basename(sys.argv[0]) == "vllm" or "vllm.entrypoints.cli.main" in sys.orig_argv
    if ours and sys.argv[1:2] == ["checkpoint"]:
        return
