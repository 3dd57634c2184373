# SPDX-License-Identifier: Apache-2.0
"""What a file meets that cannot be served exactly: an error, or a warning for who asks for it."""

from vllm import envs
from vllm.logger import init_logger

__all__ = ["refuse"]

logger = init_logger(__name__)


def refuse(problem: str, error: type[Exception] = ValueError) -> None:
    """Raise, unless ``VLLM_ALLOW_INEXACT_CHECKPOINT=1`` lets the file through.

    The only place that decides. A caller that gets control back goes on with what its
    own docstring says.

    Args:
        problem: Tensor or layer, what was found, what was expected, the way out.
        error: What is raised.
    """
    if not envs.VLLM_ALLOW_INEXACT_CHECKPOINT:
        raise error(problem)
    logger.warning("Let through by VLLM_ALLOW_INEXACT_CHECKPOINT, results are not exact: %s", problem)
