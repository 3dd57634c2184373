# SPDX-License-Identifier: Apache-2.0
"""New cache blocks are cleared, and no others."""

from types import SimpleNamespace

import pytest
import torch

from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec
from vllm.v1.worker.cpu_model_runner import CPUModelRunner


def runner(kv, block_size, kernel_size, block_dim=0):
    """As much of a runner as clearing blocks reads."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=4, dtype=torch.float32)
    backend = SimpleNamespace(get_kv_cache_block_dim=lambda *a, **k: block_dim)
    recurrent = MambaSpec(shapes=((4,),), dtypes=(torch.float32,), block_size=block_size)
    state = torch.ones(4, 4)
    fake = object.__new__(CPUModelRunner)
    fake.compilation_config = SimpleNamespace(
        static_forward_context={
            "attention": SimpleNamespace(kv_cache=kv),
            "kda": SimpleNamespace(kv_cache=[state]),
        }
    )
    fake.cache_config = SimpleNamespace(cache_dtype="auto")
    fake._kernel_block_sizes = [kernel_size, block_size]
    groups = [
        SimpleNamespace(kv_cache_spec=spec, kv_cache_group_id=0, backend=backend, layer_names=["attention"]),
        SimpleNamespace(kv_cache_spec=recurrent, kv_cache_group_id=1, backend=backend, layer_names=["kda"]),
    ]
    fake._kv_cache_spec_attn_group_iterator = lambda: iter(groups)
    return fake, state


@pytest.mark.parametrize("ratio", [1, 8])
@pytest.mark.parametrize("block_dim", [0, 1])
def test_clears_every_kernel_block_of_a_new_block_and_no_other(ratio, block_dim):
    """At ratio 8, block 3 is kernel blocks 24..31, not kernel block 3."""
    blocks, kernel_size = 6, 16
    shape = [2, 2, kernel_size, 4]
    shape[block_dim] = blocks * ratio
    kv = torch.full(shape, torch.nan)
    fake, state = runner(kv, kernel_size * ratio, kernel_size, block_dim)
    fake._zero_block_ids([3, 1])
    by_block = kv.movedim(block_dim, 0).unflatten(0, (blocks, ratio))
    for block in range(blocks):
        if block in (1, 3):
            assert (by_block[block] == 0).all()
        else:
            assert by_block[block].isnan().all()
    assert (state == 1).all()
