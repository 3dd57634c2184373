# SPDX-License-Identifier: Apache-2.0
"""Two data-parallel engines on CPU that share the experts, against the reference, in float32."""

import asyncio

import pytest

from tests.models.kimi_k3 import reference
from tests.models.kimi_k3.test_engine import BOUND, Engine, prompts_of
from tests.models.kimi_k3.test_formats import FILES
from vllm.checkpoint.tiny import make_tiny
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="CPU engine")

SECONDS = 240  # for a batch; ten times what two busy cores take


class DataParallelEngine(Engine):
    """`Engine` over two ranks; the offline class has one."""

    def __init__(self, path):
        self.loop = asyncio.new_event_loop()
        self.reference = reference.load(path)
        self.llm = self.wait(self.start(path))
        self.vocab = self.llm.model_config.get_vocab_size()

    async def start(self, path):
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        args = AsyncEngineArgs(
            str(path),
            dtype="float32",
            max_model_len=1024,
            max_num_seqs=8,
            max_logprobs=-1,
            kv_cache_memory_bytes=32 << 20,
            enable_prefix_caching=False,
            data_parallel_size=2,
            enable_expert_parallel=True,
        )
        return AsyncLLM.from_engine_args(args)

    def wait(self, work):
        return self.loop.run_until_complete(asyncio.wait_for(work, SECONDS))

    def generate(self, prompts, params):
        params.output_kind = RequestOutputKind.FINAL_ONLY

        async def one(index, tokens):
            # Two of three requests go to rank 0, so that the ranks never have equally many tokens.
            stream = self.llm.generate(
                {"prompt_token_ids": tokens}, params, f"{id(prompts)}-{index}", data_parallel_rank=int(index % 3 == 2)
            )
            return [output async for output in stream][-1]

        async def everything():
            return await asyncio.gather(*(one(*item) for item in enumerate(prompts)))

        return self.wait(everything())

    def close(self):
        self.llm.shutdown()
        tasks = asyncio.all_tasks(self.loop)
        for task in tasks:
            task.cancel()
        self.loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self.loop.close()


def test_two_ranks_that_share_the_experts(tmp_path, record_property):
    """Each rank holds half of the experts and sees the tokens of both, also when it has none itself."""
    make_tiny(tmp_path / "m", seed=3, **FILES["nvfp4-ct"])
    engine = DataParallelEngine(tmp_path / "m")
    try:
        outputs, worst = engine.run(prompts_of([1, 17, 65, 130, 2, 64], 0, engine.vocab), prompt_logprobs=True)
        _, worst_alone = engine.run(prompts_of([33], 5, engine.vocab))
    finally:
        engine.close()
    record_property("max_abs_delta_logprob", max(worst, worst_alone))
    assert max(worst, worst_alone) <= BOUND
    assert len(outputs) == 6
