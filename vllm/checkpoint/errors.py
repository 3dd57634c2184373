# SPDX-License-Identifier: Apache-2.0
"""What the checkpoint tools and the check before serving raise."""


class CheckpointError(Exception):
    """A checkpoint cannot be read, written or served as asked; the message says why.

    Not a ValueError: pydantic would wrap that one when it passes a config class.
    """


def one_error(title: str, problems: list[str], limit: int = 12) -> CheckpointError:
    """One error that lists `problems`, the first `limit` of them in full."""
    lines = [f"  - {problem}" for problem in problems[:limit]]
    if len(problems) > limit:
        lines.append(f"  and {len(problems) - limit} more")
    return CheckpointError("\n".join([title, *lines]))
