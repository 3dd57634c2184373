# SPDX-License-Identifier: Apache-2.0
"""Turning what a user can mend into a message instead of a stack of internals."""

import argparse
import sys
from collections.abc import Callable

from pydantic import ValidationError

from vllm import envs
from vllm.checkpoint.errors import CheckpointError


def run_or_explain(command: Callable[[argparse.Namespace], None], args: argparse.Namespace) -> None:
    """Run a subcommand; exit 2 with a message for bad options and bad checkpoints.

    ``VLLM_LOGGING_LEVEL=DEBUG`` shows the stack instead.
    """
    try:
        command(args)
    except (CheckpointError, ValidationError) as error:
        if envs.VLLM_LOGGING_LEVEL == "DEBUG":
            raise
        print(f"vllm {args.subparser}: {explain(error)}", file=sys.stderr)
        sys.exit(2)


def explain(error: Exception) -> str:
    """The sentences of an error, without pydantic's frame around them."""
    if not isinstance(error, ValidationError):
        return str(error)
    return "\n".join(item["msg"].removeprefix("Value error, ") for item in error.errors(include_url=False))
