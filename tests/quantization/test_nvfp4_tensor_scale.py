# SPDX-License-Identifier: Apache-2.0
"""One tensor scale for halves that had two (PUBLIC_CASES 29)."""

import logging

import pytest
import torch

from vllm.model_executor.layers.quantization.utils import nvfp4_tensor_scale
from vllm.model_executor.layers.quantization.utils.nvfp4_tensor_scale import (
    share_tensor_scale,
    share_w13_tensor_scale,
)

ROWS, COLUMNS = 6, 4


def block_scales(*shape, seed=0):
    g = torch.Generator().manual_seed(seed)
    return (torch.rand(*shape, generator=g) * 400 + 1).to(torch.float8_e4m3fn)


def values(scale, tensor_scales, rows):
    """What a code of 1 means in each block, in float64."""
    spread = torch.repeat_interleave(tensor_scales.double(), torch.tensor(rows), dim=-1)
    return scale.double() * spread.unsqueeze(-1)


@pytest.mark.parametrize("swap", [False, True])
@pytest.mark.parametrize("ratio", [1.0, 4.0, 1.25, 3.0])
def test_ratio_between_halves(ratio, swap):
    """1: bit-identical; powers of two: exact; others: one rounding in e4m3."""
    scale = block_scales(2 * ROWS, COLUMNS)
    tensor_scales = torch.tensor([0.0078125, 0.0078125 * ratio])
    if swap:
        tensor_scales = tensor_scales.flip(0)
    before = scale.clone()
    want = values(scale, tensor_scales, (ROWS, ROWS))
    done = share_tensor_scale(scale, tensor_scales, (ROWS, ROWS))
    assert done.tensor_scale == tensor_scales.max()
    got = values(scale, done.tensor_scale.expand(2), (ROWS, ROWS))
    larger = slice(0, ROWS) if tensor_scales[0] >= tensor_scales[1] else slice(ROWS, None)
    assert torch.equal(scale[larger].view(torch.uint8), before[larger].view(torch.uint8))
    if ratio in (1.0, 4.0):
        assert torch.equal(got, want) and done.rounded == 0
    else:
        assert done.rounded > 0
        assert ((got - want).abs() / want).max() <= 2**-4  # half a unit in the last of three mantissa bits
        assert done.worst == pytest.approx(((got - want).abs() / want).max().item())


def test_what_underflows_is_counted():
    scale = torch.full((2, 1), 2.0**-9).to(torch.float8_e4m3fn)  # the smallest subnormal
    done = share_tensor_scale(scale, torch.tensor([1.0, 0.25]), (1, 1))
    assert scale.float().flatten().tolist() == [2.0**-9, 0.0]
    assert (done.rounded, done.worst) == (1, 1.0)


def test_zero_block_scales_are_legal():
    scale = torch.zeros(2, 1).to(torch.float8_e4m3fn)
    assert share_tensor_scale(scale, torch.tensor([1.0, 0.3]), (1, 1)).rounded == 0


def test_three_shards_of_a_fused_linear():
    rows = (2, 3, 1)
    scale, tensor_scales = block_scales(6, COLUMNS), torch.tensor([0.5, 2.0, 1.0])
    want = values(scale, tensor_scales, rows)
    done = share_tensor_scale(scale, tensor_scales, rows)
    assert torch.equal(values(scale, done.tensor_scale.expand(3), rows), want)


@pytest.mark.parametrize("bad", [0.0, -1.0, torch.nan, torch.inf])
def test_bad_tensor_scales_are_refused(bad):
    with pytest.raises(ValueError, match="must be positive"):
        share_tensor_scale(block_scales(2, 1), torch.tensor([1.0, bad]), (1, 1))


def test_only_experts_whose_halves_differ_are_touched(monkeypatch):
    said = []
    monkeypatch.setattr(
        nvfp4_tensor_scale.logger, "warning", lambda text, *a: said.append((logging.WARNING, text % a))
    )
    monkeypatch.setattr(nvfp4_tensor_scale.logger, "info", lambda text, *a: said.append((logging.INFO, text % a)))
    scale = block_scales(3, 2 * ROWS, COLUMNS)
    before = scale.clone()
    tensor_scales = torch.tensor([[0.25, 0.25], [0.5, 0.125], [0.25, 0.25]])
    want = torch.stack([values(scale[e], tensor_scales[e], (ROWS, ROWS)) for e in range(3)])
    shared = share_w13_tensor_scale("layers.1.experts", scale, tensor_scales)
    assert shared.tolist() == [0.25, 0.5, 0.25]
    assert torch.equal(scale.double() * shared.double()[:, None, None], want)
    for expert in (0, 2):
        assert torch.equal(scale[expert].view(torch.uint8), before[expert].view(torch.uint8))
    assert said[0][0] == logging.INFO and "layers.1.experts: w1 and w3 of 1 of 3 experts" in said[0][1]
    share_w13_tensor_scale("x", scale, torch.tensor([[1.0, 1.3]] * 3))
    assert said[1][0] == logging.WARNING and "rounded by up to" in said[1][1]


def test_a_bad_expert_is_named():
    """PUBLIC_CASES 30, on every platform."""
    tensor_scales = torch.tensor([[1.0, 1.0], [1.0, 0.0]])
    with pytest.raises(ValueError, match="layers.1.experts: the tensor scale of w3 of local expert 1 is 0.0"):
        share_w13_tensor_scale("layers.1.experts", block_scales(2, 2, 1), tensor_scales)
