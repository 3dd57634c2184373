# SPDX-License-Identifier: Apache-2.0
"""Checks of a Kimi K3 checkpoint before any weight is allocated, from headers alone."""

import time
from collections import Counter
from pathlib import Path
from typing import Any

from vllm.checkpoint.errors import one_error
from vllm.checkpoint.headers import read_headers, read_json
from vllm.checkpoint.model import is_kimi_k3, read_model
from vllm.checkpoint.ranks import Deployment
from vllm.checkpoint.report import Report, build
from vllm.checkpoint.show import describe
from vllm.checkpoint.strictness import refuse
from vllm.logger import init_logger

__all__ = ["check_before_serving", "check_checkpoint"]

logger = init_logger(__name__)


def check_before_serving(args: Any) -> None:
    """Check the checkpoint that an engine is about to be built for, and log a summary.

    Other models, hub names and dummy weights pass unread, and everything does with
    ``--no-checkpoint-preflight``.

    Args:
        args: vLLM's EngineArgs.

    Raises:
        CheckpointError: What would not load, in one message.
    """
    folder = Path(args.model)
    if not args.checkpoint_preflight or args.load_format == "dummy" or not (folder / "config.json").is_file():
        return
    start = time.monotonic()
    deployment = Deployment(args.tensor_parallel_size, args.pipeline_parallel_size, args.enable_expert_parallel)
    report = check_checkpoint(folder, deployment, args.quantization)
    if report is None:
        return
    for problem in report.problems:
        logger.warning("%s", problem.text)
    formats: Counter[str] = Counter()
    for kind in report.kinds.values():
        formats += kind.formats
    padded = sum(landing.verdict == "padded" for landing in report.landings)
    logger.info(
        "%s: %d tensors in %d files fit the config; weights by format: %s; %s GiB per rank%s. Checked in %.1f s.",
        folder,
        report.tensors,
        report.files,
        describe(formats),
        "/".join(f"{stage.total / 2**30:.2f}" for stage in report.stages),
        f"; {padded} kinds of block-scaled layers are padded" if padded else "",
        time.monotonic() - start,
    )


def check_checkpoint(
    folder: Path, deployment: Deployment | None = None, quantization: str | None = None
) -> Report | None:
    """Compare config, index and headers of `folder` with what Kimi K3 needs.

    Raises:
        CheckpointError: What would not load, in one message, unless the user lets it
            through (`refuse`). A folder of another architecture passes, with no report.
    """
    if not is_kimi_k3(read_json(folder / "config.json")):
        return None
    report = build(read_model(folder, quantization), read_headers(folder), deployment)
    if report.errors:
        count = sum(report.counts.values())
        error = one_error(f"{folder}: {count} problem{'s' * (count != 1)}, with what the config says:", report.errors)
        refuse(str(error), type(error))
    return report
