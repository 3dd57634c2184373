# SPDX-License-Identifier: Apache-2.0
"""Where NVFP4 weights lie for the SM90 experts kernel.

The tensor cores take the weights as their first operand from registers. A lane
of a warp then owns, of a tile of 16 rows and 16 columns, two neighbouring columns
of two rows, twice. The layout puts what a lane owns side by side, so that a lane
fetches 16 bytes and has its operand for 64 columns. Nothing is added: 4 bits a
weight and 8 a block, as in the checkpoint.

Weights, uint8 ``[experts, rows / 16, columns / 128 * 1024]``: per 128 columns two
halves of 64; per half 32 lanes; per lane four 32-bit words. Lane ``4 g + t`` holds
rows ``g`` and ``g + 8`` of the tile and block ``t`` of the half, so that it needs two
block scales for 32 weights; word ``s`` has columns ``4 s .. 4 s + 3`` of the block.
Products sum over columns, so the tensor cores may take them in any order, as long as
the tokens' columns are in the same.

In a word each 16-bit half holds four codes, the low half the even column. Every
code sits where a rotation and a mask move it to the sign, the two low exponent bits and
the top mantissa bit of a bf16 (bits 15, 8, 7, 6); of the last one a bit needs another
shift. Four codes so placed cannot share a half with fewer operations.

====  ==============  =================  ==========  ========================
slot  row, column     sign               magnitude   to its place
====  ==============  =================  ==========  ========================
0     g, 4 s          15                 8..6        nothing
1     g + 8, 4 s      9                  2..0        left 6
2     g, 4 s + 2      3, the other half  12..10      right 4
3     g + 8, 4 s + 2  5, the other half  14, 13, 4   right 6, the last left 2
====  ==============  =================  ==========  ========================

Such a bf16 is the e2m1 value times 2**-126, exact also for 0.5, which becomes a
subnormal. One multiplication by the block scale times 2**118 makes it the weight
times 2**-8, a normal bf16: two significant bits times four fit in eight.

Block scales, uint8 ``[experts, rows / 16, columns / 128 * 128]``: per 128 columns
and lane four bytes: for the first half row ``g`` and row ``g + 8``, then for the
second. A scale is not e4m3 but its magnitude with five exponent bits, value
``2**(e - 9) * (1 + m / 8)``, so that subnormals need no case of their own:
``(byte << 4) + 0x7600`` are the bits of the bf16 scale times 2**118. Zero has no
code; blocks scaled by zero get zero weights. A negative scale flips its weights'
signs.
"""

import functools

import torch

__all__ = [
    "COLUMNS",
    "WEIGHT_FACTOR",
    "dequantize_packed",
    "down_rows",
    "gate_up_rows",
    "mxfp4_as_nvfp4",
    "pack_bank",
    "pack_experts",
]

COLUMNS = 128
"""Granule of columns; a matrix is padded to a multiple of it."""

WEIGHT_FACTOR = 256.0
"""What products carry too little, undone in float32: see the module's text."""

_ROWS = 16
_BLOCK = 16
# Where the sign and the magnitude's bits, the highest first, of an even column's code lie in
# its word, for each slot; an odd column's lie 16 bits further, around the end.
_SLOTS = ((15, 8, 7, 6), (9, 2, 1, 0), (19, 12, 11, 10), (21, 14, 13, 4))
_SCALE_BASE = 0x7600


def gate_up_rows(width: int) -> torch.Tensor:
    """Rows of a ``[gate | up]`` bank in the order of the first GEMM.

    Eight gate rows, then the up rows of the same columns: one lane's accumulators
    are then gate and up of one column, and SiTU needs no exchange.
    """
    gate = torch.arange(width).view(-1, 8)
    return torch.cat([gate, gate + width], dim=1).flatten()


def down_rows(rows: int) -> torch.Tensor:
    """Rows of the second GEMM's matrix: neighbours meet in one lane (4-byte stores)."""
    return torch.arange(rows).view(-1, 8, 2).transpose(1, 2).flatten()


@functools.cache
def _scale_codes(device: torch.device) -> torch.Tensor:
    """Map the seven magnitude bits of e4m3 to the packed code (0 and NaN: 0)."""
    codes = [0] * 128
    for bits in range(1, 127):
        exponent, mantissa = bits >> 3, bits & 7
        if exponent:
            codes[bits] = (exponent + 2) << 3 | mantissa
        else:
            top = mantissa.bit_length() - 1
            codes[bits] = top << 3 | (mantissa << 3 >> top) & 7
    return torch.tensor(codes, dtype=torch.uint8, device=device)


@functools.cache
def _slot_table(device: torch.device) -> torch.Tensor:
    """int32 ``[4 slots, 2 halves, 16 codes]``: a code's bits in its word."""
    code = torch.arange(16)
    table = torch.zeros(len(_SLOTS), 2, 16, dtype=torch.int64)
    for slot, places in enumerate(_SLOTS):
        for half in range(2):
            for bit, place in zip((3, 2, 1, 0), places):
                table[slot, half] |= (code >> bit & 1) << (place + 16 * half) % 32
    table = torch.where(table >= 1 << 31, table - (1 << 32), table)
    return table.to(torch.int32).to(device)


def pack_bank(
    codes: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack one expert's matrix.

    Args:
        codes: uint8 ``[rows, columns / 2]``, the even column in the low nibble.
        scales: e4m3 (or its bits as uint8) ``[rows, columns / 16]``.
        rows: int64, the packed order of the rows; a multiple of 16.

    Returns:
        Weights uint8 ``[rows / 16, columns' / 128 * 1024]`` and scales uint8
        ``[rows / 16, columns' / 128 * 128]``, columns' padded with zero weights.

    Raises:
        ValueError: A block scale is NaN, or a shape does not fit.
    """
    if scales.dtype != torch.uint8:
        scales = scales.view(torch.uint8)
    if rows.numel() % _ROWS or codes.shape[1] * 2 != scales.shape[1] * _BLOCK:
        raise ValueError(
            f"NVFP4 matrix {tuple(codes.shape)} with block scales "
            f"{tuple(scales.shape)}: expected a multiple of {_ROWS} rows and one "
            f"scale per {_BLOCK} columns."
        )
    device = codes.device
    codes, scales = codes[rows], scales[rows]
    pad = -codes.shape[1] % (COLUMNS // 2)
    if pad:
        codes = torch.nn.functional.pad(codes, (0, pad))
        scales = torch.nn.functional.pad(scales, (0, pad * 2 // _BLOCK))
    magnitude = scales & 0x7F
    if bool((magnitude == 0x7F).any()):
        raise ValueError("NVFP4 block scale is NaN; expected finite e4m3 values.")
    packed_scales = _scale_codes(device)[magnitude.int()]
    # Per block: flip signs under a negative scale, drop weights under zero.
    flip = (scales >> 7) * 0x88
    keep = (magnitude != 0).to(torch.uint8) * 0xFF
    blocks = codes.view(codes.shape[0], -1, _BLOCK // 2)
    blocks = (blocks ^ flip[..., None]) & keep[..., None]

    # [tile, row half, g, chunk, half, t, step, column half]: two codes a byte
    tiles = blocks.view(-1, 2, 8, blocks.shape[1] // 8, 2, 4, 4, 2)
    table = _slot_table(device)
    words = torch.zeros(1, dtype=torch.int32, device=device)
    for column_half in range(2):
        for row_half in range(2):
            part = tiles[:, row_half, ..., column_half]
            slot = table[2 * column_half + row_half]
            words = words | slot[0][(part & 15).int()] | slot[1][(part >> 4).int()]
    # [tile, g, chunk, half, t, step] -> [tile, chunk, half, g, t, step]
    words = words.permute(0, 2, 3, 1, 4, 5).contiguous()
    # [tile, row half, g, chunk, half, t] -> [tile, chunk, g, t, half, row half]
    packed_scales = packed_scales.view(-1, 2, 8, packed_scales.shape[1] // 8, 2, 4)
    packed_scales = packed_scales.permute(0, 3, 2, 5, 4, 1).contiguous()
    tile_count = rows.numel() // _ROWS
    return (
        words.view(tile_count, -1).view(torch.uint8),
        packed_scales.view(tile_count, -1),
    )


def pack_experts(
    codes: torch.Tensor, scales: torch.Tensor, gated: bool, in_place: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pack a bank of experts, one after the other.

    Args:
        codes: uint8 ``[experts, rows, columns / 2]``.
        scales: e4m3 ``[experts, rows, columns / 16]``.
        gated: Whether rows are ``[gate | up]``; then each half is padded to a
            multiple of 128 rows, so that the next GEMM has whole granules of columns.
        in_place: Whether an expert may overwrite its own bytes, so that there is never
            a second bank. One that is padded grows, and gets a new bank all the same.

    Returns:
        Weights and scales as :func:`pack_bank` returns them, stacked.
    """
    codes, scales = codes.detach(), scales.detach().view(torch.uint8)
    if gated:
        width = codes.shape[1] // 2
        pad = -width % COLUMNS
        order = gate_up_rows(width + pad)
    else:
        pad = 0
        order = down_rows(codes.shape[1])
    order = order.to(codes.device)
    packed = packed_scales = None
    for expert in range(codes.shape[0]):
        bank = codes[expert], scales[expert]
        if pad:
            bank = tuple(
                torch.nn.functional.pad(x.view(2, width, -1), (0, 0, 0, pad)).flatten(
                    0, 1
                )
                for x in bank
            )
        one, one_scales = pack_bank(*bank, order)
        if packed is None:
            packed = _room(codes, one, in_place)
            packed_scales = _room(scales, one_scales, in_place)
        assert packed_scales is not None
        packed[expert], packed_scales[expert] = one, one_scales
    assert packed is not None and packed_scales is not None
    return packed, packed_scales


def _room(bank: torch.Tensor, one: torch.Tensor, in_place: bool) -> torch.Tensor:
    """Memory for a bank of packed experts like ``one``: the unpacked bank's, or new."""
    shape = (bank.shape[0], *one.shape)
    if in_place and bank.is_contiguous() and bank[0].numel() == one.numel():
        return bank.view(shape)
    return one.new_empty(shape)


def mxfp4_as_nvfp4(
    codes: torch.Tensor, scale: torch.Tensor, halves: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Say in NVFP4's scales what MXFP4's say: the same codes, the same values.

    Each scale of 32 columns becomes two equal e4m3 scales of 16, and the largest
    exponent of an expert's gate, up or down a tensor scale. e4m3 has the powers of
    two from 2**-9 to 2**8, so weights 2**18 smaller than the largest do not fit.

    Args:
        codes: uint8 ``[experts, rows, columns / 2]``.
        scale: e8m0 as uint8 ``[experts, rows, columns / 32]``.
        halves: 2 for ``[gate | up]`` along the rows, else 1.

    Returns:
        e4m3 ``[experts, rows, columns / 16]`` and float32 ``[experts, halves]``.

    Raises:
        ValueError: Naming an expert whose exponents are too far apart.
    """
    empty = ~(codes.unflatten(2, (-1, 16)) & 0x77).bool().any(-1)
    exponent = scale.view(torch.uint8).int() - 127
    by_half = exponent.masked_fill(empty, -127).unflatten(1, (halves, -1))
    top = by_half.amax((2, 3))
    gap = exponent.unflatten(1, (halves, -1)) - top[:, :, None, None] + 8
    small = (gap < -9) & ~empty.unflatten(1, (halves, -1))
    if bool(small.any()):
        expert, half = small.nonzero()[0, :2].tolist()
        spread = 8 - int(gap[small].min())
        raise ValueError(
            f"expert {expert}, part {half} of {halves}: MXFP4 scales 2**{spread} apart, "
            "this kernel holds 2**17; use --moe-backend marlin"
        )
    block = torch.ldexp(torch.ones_like(gap, dtype=torch.float32), gap.clamp(min=-9))
    block = block.flatten(1, 2).to(torch.float8_e4m3fn)
    tensor = torch.ldexp(torch.ones_like(top, dtype=torch.float32), top - 8)
    return block.repeat_interleave(2, -1), tensor


def dequantize_packed(
    packed: torch.Tensor, scales: torch.Tensor, rows: torch.Tensor
) -> torch.Tensor:
    """Undo :func:`pack_bank` with the kernel's own operations, for tests.

    Args:
        packed: uint8 ``[rows / 16, columns / 128 * 1024]``.
        scales: uint8 ``[rows / 16, columns / 128 * 128]``.
        rows: The order given to :func:`pack_bank`.

    Returns:
        float32 ``[rows, columns]``: code times block scale, tensor scale left out.
    """
    words = packed.view(torch.int32).long() & 0xFFFFFFFF
    words = words.view(packed.shape[0], -1, 2, 8, 4, 4)  # chunk, half, g, t, step
    mask = 0x81C081C0
    right = [(words >> n | words << 32 - n) & 0xFFFFFFFF for n in (4, 6)]
    slots = [
        words & mask,
        words << 6 & mask,
        right[0] & mask,
        right[1] & 0x81808180 | words << 2 & 0x00400040,
    ]
    bits = torch.stack([torch.stack([s & 0xFFFF, s >> 16], -1) for s in slots], -2)
    # [tile, chunk, half, g, t, step, column half, row half, parity]
    bits = bits.unflatten(-2, (2, 2))
    factor = (scales.long() << 4) + _SCALE_BASE
    factor = factor.view(packed.shape[0], -1, 8, 4, 2, 2)  # chunk, g, t, half, row half
    factor = factor.permute(0, 1, 4, 2, 3, 5)[:, :, :, :, :, None, None, :, None]
    value = _bf16(bits) * _bf16(factor)
    # -> tile, row half, g, chunk, half, t, step, column half, parity
    value = value.permute(0, 7, 3, 1, 2, 4, 5, 6, 8)
    value = value.reshape(rows.numel(), -1)
    out = torch.empty(value.shape, dtype=torch.float32)
    out[rows] = value.float() * WEIGHT_FACTOR
    return out


def _bf16(bits: torch.Tensor) -> torch.Tensor:
    """Values of bf16 bit patterns, in float64: no subnormal is lost on the way."""
    exponent = bits >> 7 & 0xFF
    fraction = (bits & 0x7F).double() / 128 + (exponent > 0).double()
    value = torch.ldexp(fraction, exponent.clamp(min=1) - 127)
    return torch.where(bits >> 15 & 1 == 1, -value, value)
