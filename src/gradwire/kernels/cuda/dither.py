"""Stochastic rounding with one scale per segment, or none: codes from one pass over the flat buffer."""

import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.keys import Key
from gradwire.kernels.cuda.codes import seeds, step_words, store_codes, uniform, uniform_fours
from gradwire.kernels.cuda.enter import fetch
from gradwire.kernels.cuda.tables import BLOCK, Grid

LEVELED = tl.constexpr(0)
NATURAL = tl.constexpr(1)

_LARGEST = tl.constexpr(254)
_FIVES = tl.constexpr(512)  # bytes of trits that one program writes


@triton.jit
def _code(x, u, scale, levels, KIND: tl.constexpr):
    if KIND == LEVELED:
        level = tl.div_rn(tl.abs(x), tl.where(scale != 0, scale, 1.0) + tl.zeros_like(x)) * levels
        floor = tl.floor(level)
        q = (floor + (u < level - floor).to(tl.float32)).to(tl.int32)
        code = tl.where(x < 0, -q, q) + levels
    else:
        raw = x.to(tl.int32, bitcast=True)
        exponent = raw >> 23 & 0xFF
        up = (u < (raw & 0x7FFFFF).to(tl.float32) * 1.1920928955078125e-07).to(tl.int32)
        code = tl.maximum(exponent, tl.minimum(exponent + up, _LARGEST)) + tl.where(raw < 0, 256, 0)
    return code


@triton.jit
def _tile(
    values, scales, out, n, levels, tile_row, row_segment, starts, seeds, low, high,
    BITS: tl.constexpr, KIND: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    base = tile * BLOCK
    fours, eight = tl.arange(0, BLOCK // 4), tl.arange(0, BLOCK // 8)
    at = fours[:, None] * 4 + tl.arange(0, 4)[None, :]
    x = fetch(values + base, at, at < n - base, MASKED)
    codes = tl.zeros([BLOCK // 4, 4], tl.int32)
    for row in range(tl.load(tile_row + tile), tl.load(tile_row + tile + 1)):
        segment = tl.load(row_segment + row)
        start, seed = tl.load(starts + segment), tl.load(seeds + segment)
        first = tl.maximum(start - base, 0).to(tl.int32)
        scale = tl.load(scales + segment) if KIND == LEVELED else 1.0
        if start % 4 == 0:
            code = _code(x, uniform_fours(((base - start) >> 2) + fours, seed, low, high), scale, levels, KIND)
        else:
            code = _code(x, uniform(base - start + at, seed, low, high), scale, levels, KIND)
        codes = tl.where(at >= first, code, codes)
    live = (eight[:, None] * 8 + tl.arange(0, 8)[None, :]) < n - base
    row = tile * (BLOCK // 8) if BITS == 2 or BITS == 4 else tile * (BLOCK // 8) * BITS
    store_codes(out + row, eight, tl.reshape(codes, [BLOCK // 8, 8]), live, BITS, MASKED)


@triton.jit(do_not_specialize=["low", "high"])
def _dither(
    values, scales, out, n, levels, tile_row, row_segment, starts, seeds, low, high,
    BITS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if (tl.program_id(0).to(tl.int64) + 1) * BLOCK <= n:
        _tile(values, scales, out, n, levels, tile_row, row_segment, starts, seeds, low, high, BITS, KIND, False, BLOCK)
    else:
        _tile(values, scales, out, n, levels, tile_row, row_segment, starts, seeds, low, high, BITS, KIND, True, BLOCK)


@triton.jit(do_not_specialize=["low", "high"])
def _trits(values, scales, limits, out, n, segments, starts, seeds, low, high, FIVES: tl.constexpr):
    """Five to a byte; the eight columns are five and three idle ones. ``segments`` is the number of them."""
    byte = tl.program_id(0).to(tl.int64) * FIVES + tl.arange(0, FIVES)
    digit = tl.arange(0, 8)[None, :]
    at = byte[:, None] * 5 + digit
    live = (digit < 5) & (at < n)
    x = tl.load(values + at, mask=live, other=0.0).to(tl.float32)
    # All elements of a program mostly belong to one segment: count the starts before its first and its last.
    begin = tl.program_id(0).to(tl.int64) * FIVES * 5
    segment = tl.zeros([], tl.int32)
    top = tl.zeros([], tl.int32) + segments
    while segment < top:  # the last segment that starts no later than ``begin``
        middle = (segment + top) // 2
        if tl.load(starts + middle + 1) <= begin:
            segment = middle + 1
        else:
            top = middle
    trit = tl.zeros([FIVES, 8], tl.int32)
    end = tl.minimum(begin + FIVES * 5, n)
    start = tl.load(starts + segment)
    while start < end:
        limit, scale = tl.load(limits + segment), tl.load(scales + segment)
        size = tl.minimum(tl.abs(x), limit)
        u = uniform(at - start, tl.load(seeds + segment), low, high)
        kept = (u < tl.div_rn(size, tl.where(scale != 0, scale, 1.0) + tl.zeros_like(x))).to(tl.int32)
        new = 1 + tl.where(x > 0, kept, tl.where(x < 0, -kept, 0))
        trit = tl.where(at >= start, new, trit)
        segment += 1
        start = tl.load(starts + segment)
    weight = tl.where(digit == 0, 1, tl.where(digit == 1, 3, tl.where(digit == 2, 9, tl.where(digit == 3, 27, 81))))
    packed = tl.sum(tl.where(live, trit * weight, 0), 1).to(tl.uint8)
    tl.store(out + byte, packed, mask=byte * 5 < n)


def dither(
    values: Tensor,
    where: Grid,
    kind: tl.constexpr,
    scales: Tensor,
    out: Tensor,
    names: tuple[str, ...],
    key: Key,
    bits: int,
    levels: int = 1,
) -> None:
    """Write codes of ``bits`` bits into ``out``, an array of their `codes.word`."""
    low, high = step_words(key)
    if where.n:
        _dither[(where.tiles,)](
            values,
            scales,
            out,
            where.n,
            levels,
            where.tile_row,
            where.row_segment,
            where.starts,
            seeds(key, names, values.device),
            low,
            high,
            bits,
            kind.value,
            BLOCK,
            num_warps=8,
            enable_fp_fusion=False,
        )


def trits(
    values: Tensor, where: Grid, scales: Tensor, limits: Tensor, out: Tensor, names: tuple[str, ...], key: Key
) -> None:
    """Write trits, kept with chance |x| / scale after clamping at the limits."""
    low, high = step_words(key)
    if where.n:
        _trits[(triton.cdiv(where.n, _FIVES.value * 5),)](
            values,
            scales,
            limits,
            out,
            where.n,
            len(names),
            where.starts,
            seeds(key, names, values.device),
            low,
            high,
            _FIVES.value,
            num_warps=8,
            enable_fp_fusion=False,
        )
