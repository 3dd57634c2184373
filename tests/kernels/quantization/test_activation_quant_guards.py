# SPDX-License-Identifier: Apache-2.0
"""PUBLIC_CASES 32: quantising the activations of one token writes its outputs and nothing beside them.

Whatever a quantiser allocates lies between guard bytes here. Kernels work on tiles, and a decode
step of one token fills a fraction of one.
"""

import contextlib
import math

import pytest
import torch

from tests.kernels.moe.test_cpu_experts import Bank, assert_close, quant_layer, reference, routed, run
from vllm import _custom_ops as ops
from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape
from vllm.platforms import current_platform

GUARD, PATTERN = 4096, 0xFF  # bytes; NaN as e4m3 and as float32


class Guarded:
    """Memory between guard bytes."""

    def __init__(self):
        self.buffers = []

    def place(self, shape, stride=None, dtype=None, device=None, zero=False):
        dtype = dtype or torch.get_default_dtype()
        shape = tuple(shape)
        stride = stride or [math.prod(shape[i + 1 :]) for i in range(len(shape))]
        elements = 1 + sum((n - 1) * s for n, s in zip(shape, stride)) if all(shape) else 0
        size = elements * dtype.itemsize
        raw = torch.full((2 * GUARD + size,), PATTERN, dtype=torch.uint8, device=device)
        inside = raw[GUARD : GUARD + size].zero_() if zero else raw[GUARD : GUARD + size]
        self.buffers.append((raw, size))
        return inside.view(dtype).as_strided(shape, stride)

    def copy(self, x):
        return self.place(x.shape, dtype=x.dtype, device=x.device).copy_(x)

    def intact(self):
        return all(
            bool((raw[:GUARD] == PATTERN).all() and (raw[GUARD + size :] == PATTERN).all())
            for raw, size in self.buffers
        )


@contextlib.contextmanager
def guarded(monkeypatch):
    """Puts guards around what Python code allocates inside, and asserts at the end that they are intact."""
    memory = Guarded()

    def shape_of(size):
        return size[0] if len(size) == 1 and not isinstance(size[0], int) else size

    def like(x, dtype=None, device=None):
        return memory.place(x.shape, dtype=dtype or x.dtype, device=device or x.device)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", lambda *s, **k: memory.place(shape_of(s), **k))
        patch.setattr(torch, "zeros", lambda *s, **k: memory.place(shape_of(s), zero=True, **k))
        patch.setattr(torch, "empty_strided", lambda shape, stride, **k: memory.place(shape, stride, **k))
        patch.setattr(torch, "empty_like", like)
        yield memory
    assert memory.intact(), "a guard was overwritten"


def tokens(count, width, dtype=torch.float32, device="cpu"):
    """Rows of unlike size, blocks of unlike size in them."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(width))
    x *= 2.0 ** (torch.arange(width) // 16 % 7 - 3) * (1 + torch.arange(count)[:, None])
    return x.to(dtype).to(device)


def assert_rounded(x, codes, scale, group):
    """Dequantising gives x up to half a step of e4m3, and each group's scale takes its largest value to 448."""
    x, value = x.double().cpu(), codes.double().cpu()
    wide = scale.double().cpu().repeat_interleave(group, 1)[:, : x.shape[1]]
    step = (x / wide).abs().log2().floor().clamp(min=-6).exp2() / 8 * wide
    assert ((value * wide - x).abs() <= step * 0.502).all()
    for start in range(0, x.shape[1], group):
        largest = x[:, start : start + group].abs().amax(1)
        torch.testing.assert_close(scale[:, start // group].double().cpu(), largest / 448, rtol=1e-6, atol=0)


@pytest.mark.parametrize("at", [-1, 1])
def test_one_element_beside_the_buffer_is_noticed(monkeypatch, at):
    with pytest.raises(AssertionError, match="a guard was overwritten"), guarded(monkeypatch):
        scale = torch.empty(1, dtype=torch.float32)
        scale.as_strided((1,), (1,), scale.storage_offset() + at).fill_(1.0)


ON_CPU = pytest.mark.skipif(not current_platform.is_cpu(), reason="CPU kernels")
WIDTHS = [16, 48, 200, 576, 7168]  # below, between and above the kernels' vectors; K3's latent and hidden size


@ON_CPU
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["dynamic", "asymmetric", "static"])
def test_cpu_int8_kernels(monkeypatch, kind, dtype, width, count):
    """The quantisers that the CPU build has compiled; its FP8 and FP4 ones are declared without a kernel."""
    x = tokens(count, width, dtype)
    with guarded(monkeypatch) as memory:
        scale = memory.copy(x.float().abs().max().reshape(1) / 127) if kind == "static" else None
        codes, scale, zero = ops.scaled_int8_quant(memory.copy(x), scale, symmetric=kind != "asymmetric")
    assert codes.dtype == torch.int8
    value = (codes.double() - (0 if zero is None else zero.double())) * scale.double()
    assert ((value - x.double()).abs() <= scale.double() * 0.502).all()


@ON_CPU
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("column_major", [False, True])
def test_cpu_group_quantiser(monkeypatch, one_rank, column_major, width):
    """The dynamic 1×128 quantiser of block FP8, with a partial block at the end."""
    x = tokens(1, width)
    with guarded(monkeypatch) as memory:
        shape = GroupShape(1, 128)
        quantiser = QuantFP8(
            False, shape, column_major_scales=column_major, use_ue8m0=False, compile_native=False
        )
        codes, scale = quantiser(memory.copy(x))
    assert scale.shape == (1, -(-width // 128))
    assert_rounded(x, codes, scale, 128)


@ON_CPU
@pytest.mark.parametrize("count", [1, 3])
def test_cpu_nvfp4_emulation(monkeypatch, one_rank, count):
    """W4A4 experts round both GEMM inputs; the sum goes to the caller's buffer."""
    bank = Bank(3, 96, 48, input_scale=0.5)
    layer = quant_layer(one_rank, bank, backend="emulation")
    weights, ids = routed(count, 3, 2)
    x = torch.randn(count, 96, generator=torch.Generator().manual_seed(5))
    with guarded(monkeypatch) as memory:
        got = run(layer, memory.copy(x), weights, ids)
        assert len(memory.buffers) > 1  # the output is one of them
    want = reference(x, *(bank.dense(s) for s in ("w1", "w3", "w2")), weights, ids, rounding=(0.5, 0.5))
    assert_close(got, want, rel=1e-5)


def capable(*versions):
    return torch.cuda.is_available() and torch.cuda.get_device_capability() in versions


@pytest.mark.sm90
@pytest.mark.skipif(not capable((9, 0), (10, 0)), reason="needs a GPU of compute capability 9.0 or 10.0")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("width", [128, 640, 7168])
@pytest.mark.parametrize("layout", ["row major", "column major", "TMA"])
def test_gpu_group_quantiser(monkeypatch, layout, width, count):
    """With TMA's layout the column stride is four scales, and one token owns one of them."""
    x = tokens(count, width, torch.bfloat16, "cuda")
    with guarded(monkeypatch) as memory:
        codes, scale = per_token_group_quant_fp8(
            memory.copy(x),
            128,
            column_major_scales=layout != "row major",
            tma_aligned_scales=layout == "TMA",
            use_ue8m0=False,
        )
        torch.cuda.synchronize()
    assert_rounded(x, codes, scale, 128)


@pytest.mark.sm100
@pytest.mark.skipif(not capable((10, 0)), reason="needs a GPU of compute capability 10.0")
@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("width", [16, 80, 3584])
@pytest.mark.parametrize("swizzled", [False, True])
def test_gpu_nvfp4_quantiser(monkeypatch, swizzled, width, count):
    """Swizzled scales fill tiles of 128 rows by 4 columns, of which one token owns one row."""
    x = tokens(count, width, torch.bfloat16, "cuda")
    with guarded(monkeypatch) as memory:
        divisor = memory.copy(torch.full((1,), 2.0, device="cuda"))
        codes, scale = ops.scaled_fp4_quant(memory.copy(x), divisor, is_sf_swizzled_layout=swizzled)
        torch.cuda.synchronize()
    codes, scale = codes.cpu(), scale.float().cpu()
    if swizzled:
        # Byte of the scale of (row, block) in a tile: 32 rows of 4 groups of 4 columns.
        flat, tiles = scale.flatten(), -(-(width // 16) // 4)
        row, block = torch.meshgrid(torch.arange(count), torch.arange(width // 16), indexing="ij")
        tile = row // 128 * tiles + block // 4
        scale = flat[tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + block % 4]
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    nibbles = torch.stack([codes & 15, codes >> 4], -1).flatten(1).long()
    value = levels[nibbles & 7] * (1 - 2 * (nibbles >> 3)) * scale.repeat_interleave(16, 1).double() / 2
    # Half of the widest step between levels (4 to 6), and the rounding of the scale to e4m3.
    largest = x.cpu().double().unflatten(1, (-1, 16)).abs().amax(2).repeat_interleave(16, 1)
    assert ((value - x.cpu().double()).abs() <= largest * (1 / 6 + 1 / 16)).all()
    assert value.abs().amax() > 0
