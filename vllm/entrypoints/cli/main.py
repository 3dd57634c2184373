# SPDX-License-Identifier: Apache-2.0
"""Registers `vllm checkpoint` with the command line."""

import sys


# fork: edit 26841aa70ea6
def main(CMD_MODULES, args):
    # fork: at start
    if sys.argv[1:2] == ["checkpoint"]:
        from vllm.entrypoints.cli import checkpoint

        return checkpoint.main()
    # fork: after CMD_MODULES
    from vllm.entrypoints.cli import checkpoint

    CMD_MODULES.append(checkpoint)
    # fork: instead-of call args.dispatch_function
    from vllm.entrypoints.cli.errors import run_or_explain

    run_or_explain(args.dispatch_function, args)
