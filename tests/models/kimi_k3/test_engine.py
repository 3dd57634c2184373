# SPDX-License-Identifier: Apache-2.0
"""The engine on CPU against the independent reference, in float32.

Each engine answers mixed batches; every log-prob over the whole vocabulary, of
prompt tokens and of generated ones, is compared with a teacher-forced pass of
the reference over the same tokens.
"""

import gc
import random

import pytest
import torch

from tests.models.kimi_k3 import reference
from vllm import LLM, SamplingParams, envs
from vllm.checkpoint.tiny import TinyShape, make_tiny

BOUND = 1e-3
LENGTHS = [1, 2, 17, 63, 64, 65, 130]
BLOCK = 128  # tokens per cache block: attention pages grow to the KDA state's size

ENGINES = {
    "tp1": dict(enable_prefix_caching=False),
    # The multimodal class holds the same language model.
    "tp1-chunked-multimodal": dict(enable_prefix_caching=False, max_num_batched_tokens=48, trust_remote_code=True),
    "tp1-prefix-caching": dict(),
    "tp2": dict(tensor_parallel_size=2, enable_prefix_caching=False),
    "tp2-chunked-prefix-caching": dict(tensor_parallel_size=2, max_num_batched_tokens=256),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Class -> folder."""
    folder = tmp_path_factory.mktemp("kimi_k3")
    for arch in ("text", "multimodal"):
        make_tiny(folder / arch, arch=arch, format="bf16", seed=3)
    return folder


class Engine:
    """An engine and the reference on the same checkpoint.

    Args:
        path: The checkpoint.
        core_process: Whether the engine's core runs in a process of its own, as when serving. In this one it saves
            each start ten seconds of importing; the workers have theirs either way.
        options: Those of `LLM`.
    """

    def __init__(self, path, core_process=False, **options):
        torch.set_num_threads(1)  # the reference's many small operations only lose by more
        self.reference = reference.load(path)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", str(int(core_process)))
            self.llm = LLM(
                str(path),
                dtype="float32",
                max_model_len=1024,
                max_num_seqs=32,
                max_logprobs=-1,
                kv_cache_memory_bytes=64 << 20,  # about 130 blocks: two waves use them all
                distributed_executor_backend="mp",
                **options,
            )
        envs.disable_envs_cache()  # a core turns it on in its process, and other tests set variables
        self.vocab = self.llm.llm_engine.model_config.get_vocab_size()

    def close(self):
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()

    def generate(self, prompts, params):
        return self.llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)

    def table(self, positions) -> torch.Tensor:
        """Log-probs of positions as [positions, vocab]."""
        return torch.tensor([[p[token].logprob for token in range(self.vocab)] for p in positions])

    def run(self, prompts, tokens: int = 8, prompt_logprobs: bool = False):
        """Generate greedily; return outputs and the largest |delta log-prob|."""
        params = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=-1,
            detokenize=False,
            prompt_logprobs=-1 if prompt_logprobs else None,
        )
        outputs = self.generate(prompts, params)
        worst = 0.0
        for prompt, output in zip(prompts, outputs):
            generated = output.outputs[0]
            assert len(generated.token_ids) == tokens
            want = self.reference.logprobs(prompt + list(generated.token_ids)[:-1])
            got = self.table(generated.logprobs)
            if prompt_logprobs and len(prompt) > 1:
                got = torch.cat([self.table(output.prompt_logprobs[1:]), got])
            worst = max(worst, (got - want[-len(got) :]).abs().max().item())
        return outputs, worst


@pytest.fixture(scope="module", params=ENGINES)
def engine(request, checkpoints):
    arch = "multimodal" if "multimodal" in request.param else "text"
    engine = Engine(checkpoints / arch, **ENGINES[request.param])
    engine.options = ENGINES[request.param]
    yield engine
    engine.close()


def prompts_of(lengths, seed: int, vocab: int):
    rng = random.Random(seed)
    return [[rng.randrange(vocab) for _ in range(n)] for n in lengths]


def test_prefill_and_decode(engine, record_property):
    """Prompts below, at and above KDA chunk and page sizes; token-by-token decode."""
    cached = engine.options.get("enable_prefix_caching", True)
    _, worst = engine.run(prompts_of(LENGTHS, 0, engine.vocab), prompt_logprobs=not cached)
    record_property("max_abs_delta_logprob", worst)
    assert worst <= BOUND


def test_24_concurrent_requests_reuse_blocks(engine, record_property):
    """Two waves on one cache: each inherits blocks that earlier requests left full."""
    rng = random.Random(1)
    for wave in range(2):
        lengths = [rng.choice([1, 1, 1, 2, 5, 17, 63, 64, 65, 130, 200]) for _ in range(24)]
        _, worst = engine.run(prompts_of(lengths, wave, engine.vocab), tokens=6)
        record_property(f"max_abs_delta_logprob_{wave}", worst)
        assert worst <= BOUND


def test_shared_prefixes(engine, record_property):
    """A cached prefix brings back KDA state, convolution history and latent cache."""
    base, other = prompts_of([300, 90], 2, engine.vocab)
    engine.run([base], tokens=2)
    prompts = [base + other[:5], base[:280] + other, base, base[:256], other]
    outputs, worst = engine.run(prompts, tokens=4)
    record_property("max_abs_delta_logprob", worst)
    assert worst <= BOUND
    cached = [output.num_cached_tokens for output in outputs]
    if engine.options.get("enable_prefix_caching", True):
        assert max(cached[:4]) == 2 * BLOCK and cached[4] == 0
    else:
        assert cached == [0] * 5


def test_other_head_counts_and_widths(tmp_path, record_property):
    """KDA width 64 beside MLA of the same; 8 heads; a layer pattern of its own."""
    make_tiny(tmp_path / "m", seed=5, shape=TinyShape(heads=8, head_dim=64, layers="KMKKM", experts=6, top_k=3))
    engine = Engine(tmp_path / "m", core_process=True, tensor_parallel_size=2)
    try:
        _, worst = engine.run(prompts_of(LENGTHS, 4, engine.vocab))
        record_property("max_abs_delta_logprob", worst)
        assert worst <= BOUND
    finally:
        engine.close()
