"""Stochastic rounding with one scale per segment, or none: codes from one pass over the flat buffer."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.graph_refs import cached_on_device
from gradwire.core.keys import Key
from gradwire.kernels.cuda.accumulate import fetch
from gradwire.kernels.cuda.codes import inverse, quotient, seeds, step_words, store_codes, uniform, uniform_fours
from gradwire.kernels.cuda.tables import BLOCK, Grid, grid

LEVELED = tl.constexpr(0)
NATURAL = tl.constexpr(1)

_LARGEST = tl.constexpr(254)
_WORDS = tl.constexpr(128)  # of twenty trits, that one program writes


@triton.jit
def _code(x, u, scale, levels, KIND: tl.constexpr):
    if KIND == LEVELED:
        level = quotient(tl.abs(x).to(tl.float64), inverse(scale)) * levels
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
    values, scales, out, n, levels, tile_row, tile_segment, row_segment, starts, seeds, low, high,
    BITS: tl.constexpr, KIND: tl.constexpr, FOURS: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    base = tile * BLOCK
    fours, eight = tl.arange(0, BLOCK // 4), tl.arange(0, BLOCK // 8)
    at = fours[:, None] * 4 + tl.arange(0, 4)[None, :]
    x = fetch(values + base, at, at < n - base, MASKED)
    codes = tl.zeros([BLOCK // 4, 4], tl.int32)
    row, stop, segment = tl.load(tile_row + tile), tl.load(tile_row + tile + 1), tl.load(tile_segment + tile)
    while row < stop:
        start, seed = tl.load(starts + segment), tl.load(seeds + segment)
        first = tl.maximum(start - base, 0).to(tl.int32)
        scale = tl.load(scales + segment) if KIND == LEVELED else 1.0
        if FOURS:
            code = _code(x, uniform_fours(((base - start) >> 2) + fours, seed, low, high), scale, levels, KIND)
        else:
            code = _code(x, uniform(base - start + at, seed, low, high), scale, levels, KIND)
        codes = tl.where(at >= first, code, codes)
        row += 1
        if row < stop:
            segment = tl.load(row_segment + row)
    live = (eight[:, None] * 8 + tl.arange(0, 8)[None, :]) < n - base
    row = tile * (BLOCK // 8) if BITS == 2 or BITS == 4 else tile * (BLOCK // 8) * BITS
    store_codes(out + row, eight, tl.reshape(codes, [BLOCK // 8, 8]), live, BITS, MASKED)


@triton.jit(do_not_specialize=["low", "high"])
def _dither(
    values, scales, out, n, levels, tile_row, tile_segment, row_segment, starts, seeds, low, high,
    BITS: tl.constexpr, KIND: tl.constexpr, FOURS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """FOURS: all segments start at multiples of four, so that four values in a row share a block of random words."""
    if (tl.program_id(0).to(tl.int64) + 1) * BLOCK <= n:
        _tile(
            values, scales, out, n, levels, tile_row, tile_segment, row_segment, starts, seeds, low, high,
            BITS, KIND, FOURS, False, BLOCK,
        )  # fmt: skip
    else:
        _tile(
            values, scales, out, n, levels, tile_row, tile_segment, row_segment, starts, seeds, low, high,
            BITS, KIND, FOURS, True, BLOCK,
        )  # fmt: skip


@triton.jit
def _kept(x, at, four, ahead, limit, over, seed, low, high, FOURS: tl.constexpr):
    """Trits of values that are ``ahead`` of where their segment starts; ``over`` is 1 / scale."""
    size = tl.minimum(tl.abs(x), limit).to(tl.float64)
    u = uniform_fours((ahead >> 2) + four, seed, low, high) if FOURS else uniform(ahead + at, seed, low, high)
    kept = (u < quotient(size, over)).to(tl.int32)
    return 1 + tl.where(x > 0, kept, tl.where(x < 0, -kept, 0))


@triton.jit
def _word(trit, part):
    """What trits 4 * part to 4 * part + 3 of twenty add to their word, which has five digits in each byte."""
    digit = 4 * part + tl.arange(0, 4)[None, :]
    third = digit % 5
    weight = tl.where(third < 2, tl.where(third == 0, 1, 3), tl.where(third == 2, 9, tl.where(third == 3, 27, 81)))
    return tl.sum(trit * (weight << digit // 5 * 8), 1)


@triton.jit
def _alone(values, limit, over, seed, low, high, ahead, WORDS: tl.constexpr):
    """The words of values of one segment, which is ``ahead`` of where it starts: a multiple of four."""
    first = tl.arange(0, WORDS) * 5
    at = first[:, None] * 4 + tl.arange(0, 4)[None, :]
    a, b, c = tl.load(values + at), tl.load(values + at + 4), tl.load(values + at + 8)  # at once: each wait is long
    d, e = tl.load(values + at + 12), tl.load(values + at + 16)
    word = tl.zeros([WORDS], tl.int32)
    for part in tl.static_range(5):
        x = a if part == 0 else b if part == 1 else c if part == 2 else d if part == 3 else e
        trit = _kept(x.to(tl.float32), at, first + part, ahead, limit, over, seed, low, high, True)
        word += _word(trit, part)
    return word


@triton.jit
def _several(
    values, scales, limits, starts, seeds, segment, base, n, low, high, FOURS: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """The words of values of any number of segments, and of none: those have zeros."""
    word = tl.zeros([WORDS], tl.int32)
    end = tl.minimum(base + WORDS * 20, n)
    for part in range(5):
        four = tl.arange(0, WORDS) * 5 + part
        at = four[:, None] * 4 + tl.arange(0, 4)[None, :]
        x = fetch(values + base, at, at < n - base, True)
        trit, turn, start = tl.zeros([WORDS, 4], tl.int32), segment, tl.load(starts + segment)
        while start < end:
            limit, over = tl.load(limits + turn), inverse(tl.load(scales + turn))
            new = _kept(x, at, four, base - start, limit, over, tl.load(seeds + turn), low, high, FOURS)
            trit = tl.where(at >= start - base, new, trit)
            turn += 1
            start = tl.load(starts + turn)
        word += _word(tl.where(at < n - base, trit, 0), part)
    return word


@triton.jit(do_not_specialize=["low", "high"])
def _trits(
    values, scales, limits, out, n, owner, starts, seeds, low, high, FOURS: tl.constexpr, WORDS: tl.constexpr
):  # fmt: skip
    """Five values to a byte, twenty to a word; whose the first value of each program is, ``owner`` says."""
    program = tl.program_id(0).to(tl.int64)
    base = program * (WORDS * 20)
    segment = tl.load(owner + program)
    start, stop = tl.load(starts + segment), tl.load(starts + segment + 1)
    at = program * WORDS + tl.arange(0, WORDS)
    alone = base + WORDS * 20 <= stop
    if not FOURS:
        alone = stop < 0
    if alone:
        limit, over, seed = tl.load(limits + segment), inverse(tl.load(scales + segment)), tl.load(seeds + segment)
        word = _alone(values + base, limit, over, seed, low, high, base - start, WORDS)
        tl.store(out.to(tl.pointer_type(tl.int32)) + at, word)
    else:
        word = _several(values, scales, limits, starts, seeds, segment, base, n, low, high, FOURS, WORDS)
        for i in tl.static_range(4):
            byte = at * 4 + i
            tl.store(out + byte, (word >> 8 * i).to(tl.uint8), mask=byte * 5 < n)


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
    if where.n:
        _dither[(where.tiles,)](
            values, scales, out, where.n, levels, *where.tables, seeds(key, names, values.device), *step_words(key),
            bits, kind.value, where.fours, BLOCK,
            num_warps=4 if kind is NATURAL else 8,
            maxnreg=96 if kind is NATURAL else 64,  # enough, and more programs fit side by side
            enable_fp_fusion=False,
        )  # fmt: skip


def trits(
    values: Tensor, lengths: tuple[int, ...], scales: Tensor, limits: Tensor, out: Tensor, names: tuple[str, ...],
    key: Key,
) -> None:  # fmt: skip
    """Write trits, kept with chance |x| / scale after clamping at the limits."""
    where = grid(lengths, values.device)
    if where.n:
        owner = _owners(lengths, _WORDS.value * 20, values.device)
        _trits[(owner.numel(),)](
            values, scales, limits, out, where.n, owner, where.starts, seeds(key, names, values.device),
            *step_words(key), where.fours, _WORDS.value, num_warps=4, maxnreg=64, enable_fp_fusion=False,
        )  # fmt: skip


@cached_on_device(64)
def _owners(lengths: tuple[int, ...], tile: int, device: torch.device) -> Tensor:
    """The segment that each tile's first value belongs to; int32[tiles]."""
    ends = torch.tensor(lengths, dtype=torch.int64).cumsum(0)
    return torch.searchsorted(ends, torch.arange(0, int(ends[-1]), tile), right=True).int().to(device)
