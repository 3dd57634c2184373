# SPDX-License-Identifier: Apache-2.0
"""Experts that vLLM's load balancer moves answer like experts that were loaded where they are now."""

import queue
import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.moe.test_cpu_compressed_experts import MxBank, compressed_mxfp4, compressed_nvfp4, divided
from tests.kernels.moe.test_cpu_experts import Bank, load, make_layer, nvfp4, routed, run
from vllm.distributed import parallel_state
from vllm.distributed.eplb.eplb_communicator import EplbCommunicator
from vllm.distributed.eplb.rebalance_execute import rearrange_expert_weights_inplace
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config
from vllm.platforms import current_platform

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="experts of the CPU platform")

EXPERTS, HIDDEN, WIDTH = 4, 64, 32
ORDER = [3, 1, 2, 0]


def nvfp4_bank(order=range(EXPERTS)):
    """`weight_scale_2` 1, 2, 4, 8 times a factor of each shard; slot i holds the file's expert order[i]."""
    factor = {"w1": 0.01, "w3": 0.0125, "w2": 0.03}
    bank = Bank(EXPERTS, HIDDEN, WIDTH, seed=7, scales=lambda e, shard: factor[shard] * 2.0**e, input_scale=0.5)
    return reordered(bank, order)


def reordered(bank, order):
    bank.tensors = {(slot, s): bank.tensors[e, s] for slot, e in enumerate(order) for s in ("w1", "w3", "w2")}
    return bank


def mx_bank(order=range(EXPERTS)):
    return reordered(MxBank(EXPERTS, HIDDEN, WIDTH, seed=7), order)


def dense_file(bank):
    for e in range(EXPERTS):
        for shard in ("w1", "w3", "w2"):
            yield f"{e}.{shard}.weight", bank.dense(shard)[e].float()


# Format → (bank, tensors as the file has them, quantisation config, backend).
FORMATS = {
    "unquantised": (nvfp4_bank, dense_file, lambda: None, "auto"),
    "modelopt": (nvfp4_bank, lambda bank: bank.file(), nvfp4, "auto"),
    "modelopt W4A4": (nvfp4_bank, lambda bank: bank.file(), nvfp4, "emulation"),
    "compressed-tensors": (nvfp4_bank, divided, compressed_nvfp4, "auto"),
    "compressed-tensors W4A4": (nvfp4_bank, divided, compressed_nvfp4, "emulation"),
    "mxfp4": (mx_bank, lambda bank: bank.file("weight"), Mxfp4Config, "auto"),
    "mxfp4 compressed-tensors": (mx_bank, lambda bank: bank.file("weight"), compressed_mxfp4, "auto"),
}


class Mailbox(EplbCommunicator):
    """What one simulated rank sends and receives."""

    def __init__(self, rank, boxes):
        self.rank, self.boxes, self.sends, self.receives = rank, boxes, [], []

    def add_send(self, tensors, dst_rank, expert_id):
        self.sends.append((dst_rank, expert_id, tensors))

    def add_recv(self, tensors, src_rank, expert_id):
        self.receives.append((src_rank, expert_id, tensors))

    def execute(self):
        for rank, expert, tensors in self.sends:
            self.boxes[self.rank, rank, expert].put([t.clone() for t in tensors])
        for rank, expert, tensors in self.receives:
            for mine, theirs in zip(tensors, self.boxes[rank, self.rank, expert].get(timeout=60), strict=True):
                mine.copy_(theirs)


def rearrange(layers, order):
    """Run vLLM's re-arrangement of one layer on all simulated ranks; slot i gets the expert in slot order[i].

    The layers need no more than what `RoutedExperts.get_expert_weights` reads.
    """
    boxes = defaultdict(queue.Queue)
    before, after = torch.arange(len(order))[None], torch.tensor(order)[None]
    failed = []

    def work(rank, layer):
        try:
            weights = list(RoutedExperts.get_expert_weights(layer))
            group = SimpleNamespace(size=lambda: len(layers), rank=lambda: rank)
            buffers = [torch.empty_like(w) for w in weights]
            rearrange_expert_weights_inplace(before, after, [weights], buffers, group, Mailbox(rank, boxes))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=item) for item in enumerate(layers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed, failed


@pytest.fixture
def ranks(one_rank, monkeypatch):
    """Makes and loads the layer of every expert-parallel rank, of a group of one or two."""

    def make(name, size, order=range(EXPERTS)):
        bank, file, quant, backend = FORMATS[name]
        bank, layers = bank(order), []
        for rank in range(size):
            with monkeypatch.context() as patch:
                patch.setattr(one_rank.parallel_config, "enable_expert_parallel", size > 1)
                patch.setattr(parallel_state._TP, "rank_in_group", rank)
                # Ranks are made one after the other; the input scale, the same in all experts, needs no exchange.
                patch.setattr(torch.distributed, "all_reduce", lambda *_: None)
                layer = make_layer(
                    one_rank, EXPERTS, HIDDEN, WIDTH, quant=quant(), backend=backend, dtype=torch.float32, tp_size=size
                )
                assert layer.local_num_experts == EXPERTS // size
                layers.append(load(layer, file(bank)))
        return layers

    return make


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", FORMATS)
def test_a_swap_equals_a_fresh_load_of_the_swapped_file(ranks, name, size):
    """PUBLIC_CASES 33: experts 0 and 3 change places, within a rank and between two."""
    moved, fresh, loaded = ranks(name, size), ranks(name, size, ORDER), ranks(name, size)
    rearrange(moved, ORDER)
    weights, ids = routed(9, EXPERTS, 2)
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(3))
    for got, want, old in zip(moved, fresh, loaded, strict=True):
        ours, theirs = dict(got.named_parameters()), dict(want.named_parameters())
        assert set(ours) == set(theirs)
        for parameter in ours:
            assert torch.equal(bits(ours[parameter]), bits(theirs[parameter])), parameter
        answer = run(got, x, weights, ids)
        assert torch.equal(answer, run(want, x, weights, ids))
        assert (answer - run(old, x, weights, ids)).abs().max() > 0.1 * answer.abs().max()


def bits(tensor):
    return tensor.detach().reshape(-1).view(torch.uint8)
