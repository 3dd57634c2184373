# SPDX-License-Identifier: Apache-2.0
"""A converted checkpoint serves, with the log-probs that the reference computes from its source."""

import random
import time

import pytest

from tests.models.kimi_k3 import reference
from tests.models.kimi_k3.test_engine import BOUND, Engine, prompts_of
from vllm.checkpoint.convert import convert
from vllm.checkpoint.tiny import make_tiny
from vllm.engine import arg_utils
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="CPU engine")


def test_mxfp4_served_as_nvfp4_equals_the_reference_on_mxfp4(tmp_path, monkeypatch, record_property):
    """Float32, so that what remains is the rounding of sums; the check before loading takes under 2 % of the start."""
    make_tiny(tmp_path / "mxfp4", format="mxfp4", seed=3)
    convert(tmp_path / "mxfp4", tmp_path / "nvfp4", "nvfp4-modelopt")
    checks = []
    check = arg_utils.check_before_serving

    def timed(args):
        start = time.monotonic()
        check(args)
        checks.append(time.monotonic() - start)

    monkeypatch.setattr(arg_utils, "check_before_serving", timed)
    start = time.monotonic()
    engine = Engine(tmp_path / "nvfp4", core_process=True, enable_prefix_caching=False)
    started = time.monotonic() - start
    try:
        engine.reference = reference.load(tmp_path / "mxfp4")
        rng = random.Random(1)
        lengths = [1, 2, 17, 64, 65, 130, *(rng.choice([5, 40, 90]) for _ in range(4))]
        _, worst = engine.run(prompts_of(lengths, 0, engine.vocab), prompt_logprobs=True)
    finally:
        engine.close()
    record_property("max_abs_delta_logprob", worst)
    assert worst <= BOUND
    assert checks and sum(checks) <= 0.02 * started, (checks, started)
