# SPDX-License-Identifier: Apache-2.0
"""A second load of the same weights leaves every log-prob as it was."""

import pytest
import torch

from tests.models.kimi_k3.test_engine import BOUND, LENGTHS, Engine, prompts_of
from tests.models.kimi_k3.test_formats import FILES, need
from vllm.checkpoint.tiny import make_tiny
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="CPU engine")


@pytest.mark.parametrize("name", ["nvfp4-modelopt", "nvfp4-ct", "mxfp4", "fp8-block-ct"])
def test_reload_changes_nothing(tmp_path, name):
    """PUBLIC_CASES 36, and the same of every quantised format.

    On 0.28.0's way of loading, the padded rows of KDA's projection would be what memory held.
    """
    need(name)
    make_tiny(tmp_path / "m", seed=11, **FILES[name])
    engine = Engine(tmp_path / "m", enable_prefix_caching=False)
    prompts = prompts_of(LENGTHS, 7, engine.vocab)

    def answers():  # one at a time: how requests are batched may change the last bits
        found = [engine.run([prompt], tokens=3) for prompt in prompts]
        assert max(worst for _, worst in found) <= BOUND
        return [outputs[0] for outputs, _ in found]

    try:
        before = answers()
        engine.llm.collective_rpc("reload_weights")
        after = answers()
    finally:
        engine.close()
    for old, new in zip(before, after):
        assert old.outputs[0].token_ids == new.outputs[0].token_ids
        tables = [engine.table(o.outputs[0].logprobs) for o in (old, new)]
        torch.testing.assert_close(*tables, rtol=0, atol=0)
