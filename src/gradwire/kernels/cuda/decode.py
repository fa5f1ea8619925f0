"""Codes and scales back to floats, in one pass."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.accumulate import put
from gradwire.kernels.cuda.blockwise import Slabs
from gradwire.kernels.cuda.codes import eight, load_codes, load_eights, reciprocal, step_of
from gradwire.kernels.cuda.tables import BLOCK, Grid

SIGN = tl.constexpr(0)
SIDE = tl.constexpr(1)  # one of two scales
LEVEL = tl.constexpr(2)  # scale * (code / levels)
TRIT = tl.constexpr(3)
POWER = tl.constexpr(4)  # a sign and an exponent; no scale

_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
SLAB = 2048  # values of blocks, for one program
_WHOLE = (1, 2, 4, 8)  # bits, of which eight codes make bytes that nothing else is in


@triton.jit
def _value(code, scale, other, high_part, low_part, LEVELS: tl.constexpr, KIND: tl.constexpr):
    if KIND == SIGN:
        x = tl.where(code == 1, scale, -scale)
    elif KIND == SIDE:
        x = tl.where(code == 1, scale, other)
    elif KIND == LEVEL:
        x = scale * step_of(code, high_part, low_part, LEVELS)
    elif KIND == TRIT:
        x = scale * (code - 1).to(tl.float32)
    else:
        power = ((code & 0xFF) << 23).to(tl.float32, bitcast=True)
        x = tl.where(code > 0xFF, -power, power)
    return x


@triton.jit
def _third(byte, digit):
    """A digit of a byte. Products with 2^16 over a power of three, rounded up, are exact for numbers of 8 bits."""
    part = tl.where(digit < 2, tl.where(digit == 0, 65536, 21846), tl.where(digit == 2, 7282, 2428))
    q = byte * tl.where(digit == 4, 810, part) >> 16
    return q - 3 * (q * 21846 >> 16)


@triton.jit
def _values(
    low, high, scale, other, high_part, low_part, LEVELS: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr
):  # fmt: skip
    """Of eights that each have one scale. [N] -> [N, 8]."""
    MASK: tl.constexpr = (1 << BITS) - 1
    return eight(
        _value(low & MASK, scale, other, high_part, low_part, LEVELS, KIND),
        _value(low >> BITS & MASK, scale, other, high_part, low_part, LEVELS, KIND),
        _value(low >> 2 * BITS & MASK, scale, other, high_part, low_part, LEVELS, KIND),
        _value(low >> 3 * BITS & MASK, scale, other, high_part, low_part, LEVELS, KIND),
        _value(high & MASK, scale, other, high_part, low_part, LEVELS, KIND),
        _value(high >> BITS & MASK, scale, other, high_part, low_part, LEVELS, KIND),
        _value(high >> 2 * BITS & MASK, scale, other, high_part, low_part, LEVELS, KIND),
        _value(high >> 3 * BITS & MASK, scale, other, high_part, low_part, LEVELS, KIND),
    )


@triton.jit
def _eights(
    data, scales, second, out, size, high_part, low_part, tile_row, tile_segment, row_segment, starts,
    LEVELS: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A whole tile of segments that start with whole eights."""
    tile = tl.program_id(0).to(tl.int64)
    base = tile * BLOCK
    row, stop, segment = tl.load(tile_row + tile), tl.load(tile_row + tile + 1), tl.load(tile_segment + tile)
    e = tl.arange(0, BLOCK // 8)
    byte = tile * (BLOCK // 8) * BITS
    low, high = load_eights(data + byte, e, size - byte, BITS, WIDE)
    scale = tl.where(e >= 0, tl.load(scales + segment), 0.0)
    other = tl.where(e >= 0, tl.load(second + segment), 0.0)
    for later in range(row + 1, stop):
        segment = tl.load(row_segment + later)
        inside = e * 8 >= tl.load(starts + segment) - base  # and no later segment's: those come after
        scale = tl.where(inside, tl.load(scales + segment), scale)
        other = tl.where(inside, tl.load(second + segment), other)
    at = e[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(out + base + at, _values(low, high, scale, other, high_part, low_part, LEVELS, KIND, BITS))


@triton.jit
def _slab(
    data, scales, out, start, size, group, bytes, high_part, low_part,
    LEVELS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ACROSS: tl.constexpr, WIDE: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    e = tl.arange(0, ACROSS * GROUP // 8)
    byte = start // 8 * BITS
    low, high = load_eights(data + byte, e, bytes - byte, BITS, WIDE)
    to = scales + group + e * 8 // GROUP
    scale = tl.load(to, mask=e * 8 < size, other=0.0) if MASKED else tl.load(to)
    at = e[:, None] * 8 + tl.arange(0, 8)[None, :]
    put(out + start, at, _values(low, high, scale, scale, high_part, low_part, LEVELS, LEVEL, BITS), at < size, MASKED)


@triton.jit
def _decode_blocks(
    data, scales, out, starts, sizes, groups, bytes, high_part, low_part,
    LEVELS: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, ACROSS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    slab = tl.program_id(0)
    start, size, group = tl.load(starts + slab), tl.load(sizes + slab), tl.load(groups + slab)
    start = tl.multiple_of(start, 8)
    if size == ACROSS * GROUP:
        _slab(
            data, scales, out, start, size, group, bytes, high_part, low_part, LEVELS, BITS, GROUP, ACROSS, WIDE, False
        )
    else:
        _slab(
            data, scales, out, start, size, group, bytes, high_part, low_part, LEVELS, BITS, GROUP, ACROSS, False, True
        )


@triton.jit
def _tile(
    data, scales, second, out, n, size, high_part, low_part, tile_row, row_segment, starts, first_group,
    LEVELS: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    base = tile * BLOCK
    at = tl.arange(0, BLOCK)
    live = at < n - base
    if KIND == TRIT:
        digit = (base % 5).to(tl.int32) + at
        code = _third(tl.load(data + base // 5 + digit // 5, mask=live, other=0).to(tl.int32), digit % 5)
    else:
        byte = tile * (BLOCK // 8) * BITS
        code = load_codes(data + byte, at, size - byte, live, BITS)
    scale = tl.zeros([BLOCK], tl.float32)
    other = scale
    if KIND != POWER:
        for row in range(tl.load(tile_row + tile), tl.load(tile_row + tile + 1)):
            segment = tl.load(row_segment + row)
            ahead = base - tl.load(starts + segment)
            first = tl.maximum(-ahead, 0).to(tl.int32)
            inside = at >= first  # and no later segment's: those come after
            if GROUP == 0:
                scale = tl.where(inside, tl.load(scales + segment), scale)
                if KIND == SIDE:
                    other = tl.where(inside, tl.load(second + segment), other)
            else:
                ahead = tl.maximum(ahead, 0)
                end = tl.minimum(tl.load(starts + segment + 1) - base, BLOCK).to(tl.int32)
                group = (at - first + (ahead % GROUP).to(tl.int32)) // GROUP
                to = scales + tl.load(first_group + segment) + ahead // GROUP
                scale = tl.where(inside, tl.load(to + group, mask=inside & (at < end), other=0.0), scale)
    put(out + base, at, _value(code, scale, other, high_part, low_part, LEVELS, KIND), live, MASKED)


@triton.jit
def _decode(
    data, scales, second, out, n, size, high_part, low_part, tile_row, tile_segment, row_segment, starts, first_group,
    LEVELS: tl.constexpr, KIND: tl.constexpr, BITS: tl.constexpr, GROUP: tl.constexpr, EIGHTS: tl.constexpr,
    WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """EIGHTS: whichever eight values share bytes share a scale."""
    if (tl.program_id(0).to(tl.int64) + 1) * BLOCK <= n:
        if EIGHTS:
            _eights(
                data, scales, second, out, size, high_part, low_part, tile_row, tile_segment, row_segment, starts,
                LEVELS, KIND, BITS, WIDE, BLOCK,
            )  # fmt: skip
        else:
            _tile(
                data, scales, second, out, n, size, high_part, low_part, tile_row, row_segment, starts, first_group,
                LEVELS, KIND, BITS, GROUP, False, BLOCK,
            )  # fmt: skip
    else:
        _tile(
            data, scales, second, out, n, size, high_part, low_part, tile_row, row_segment, starts, first_group,
            LEVELS, KIND, BITS, GROUP, True, BLOCK,
        )  # fmt: skip


def decode(
    data: Tensor,
    scales: Tensor,
    where: Grid,
    kind: tl.constexpr,
    bits: int = 1,
    levels: int = 1,
    second: Tensor | None = None,
    group: int = 0,
    first_group: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The values of a stream of codes. With ``group``, a scale holds for that many values of a segment."""
    out = torch.empty(where.n, dtype=torch.float32, device=data.device) if out is None else out
    flat = kind.value in (SIGN.value, SIDE.value, LEVEL.value) and group == 0
    if where.n:
        _decode[(where.tiles,)](
            data, scales, scales if second is None else second, out, where.n, data.numel(), *reciprocal(levels),
            *where.tables, where.starts if first_group is None else first_group, levels, kind.value, bits, group,
            flat and bits in _WHOLE and where.eights, data.data_ptr() % 4 == 0, BLOCK, **_OPTIONS,
        )  # fmt: skip
    return out


def decode_blocks(
    data: Tensor,
    scales: Tensor,
    flat: Grid,
    where: Slabs,
    bits: int,
    levels: int,
    block: int,
    out: Tensor | None = None,
) -> Tensor:
    """The values of codes of which each block of a segment has a scale."""
    if not where.aligned or block != where.width or bits not in _WHOLE:
        return decode(data, scales, flat, LEVEL, bits, levels, group=block, first_group=where.first_group, out=out)
    out = torch.empty(where.n, dtype=torch.float32, device=data.device) if out is None else out
    if where.n:
        _decode_blocks[(where.start.numel(),)](
            data, scales, out, where.start, where.size, where.group, data.numel(), *reciprocal(levels), levels, bits,
            block, where.across, data.data_ptr() % 4 == 0, **_OPTIONS,
        )  # fmt: skip
    return out
