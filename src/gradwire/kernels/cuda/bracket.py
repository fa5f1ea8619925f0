"""A short cut to the last winner where many are wanted: a sample says about where it lies, and two passes prove it.

`guess` finds, by the first two digits of a sample, a range of keys in which the last winner ought to lie. `prove`
counts the entries above it, and those at each step of it; then, once more, those at each key of one step. Hardly any
entry lies there, so that both are as fast as memory. Where the guess is wrong, or too many lie there, `radix` does it
all.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.census import sampled
from gradwire.kernels.cuda.plan import (
    ABOVE,
    ALIKE,
    BAR,
    BINS,
    COLUMNS,
    COUNT,
    KEY,
    LAST,
    LENGTH,
    LOST,
    MET,
    MISSED,
    NEAR,
    STEP,
)
from gradwire.kernels.cuda.radix import STRIDE, is_last, stretch, tile_of
from gradwire.kernels.cuda.sweep import key_of

_DIGIT = tl.constexpr(256)
_BELOW = tl.constexpr(15)  # bits of a key below its first two digits
_WIDEST = tl.constexpr(32)  # values of the second digit: of more, a step would have more keys than there are bins
_CROWD = tl.constexpr(131072)  # entries that may lie in the range: programs count them one by one,
_SHARE = tl.constexpr(128)  # and one more for so many of all


@triton.jit
def _from_above(bins, COUNT: tl.constexpr):
    every = tl.load(bins + tl.arange(0, COUNT)).to(tl.int64)
    return every, tl.sum(every, 0) - tl.cumsum(every, 0) + every


@triton.jit
def _octave(entry, line, bins):
    """From the sample's first digits: the one that the last winner should have."""
    every, reached = _from_above(bins, _DIGIT)
    taken = tl.sum(every, 0)
    due = tl.load(entry + COUNT).to(tl.float32) * taken.to(tl.float32) / tl.load(entry + LENGTH).to(tl.float32)
    due = tl.minimum(tl.maximum(due.to(tl.int64), 1), taken)
    digit = tl.sum((reached >= due).to(tl.int32), 0) - 1
    tl.store(line + KEY, digit.to(tl.int64))
    tl.store(line + LAST, due - tl.sum(tl.where(tl.arange(0, _DIGIT) > digit, every, 0), 0))
    tl.store(line + ALIKE, taken)


@triton.jit
def _range(entry, line, bins):
    """From its second digits: a range that holds the last winner, unless the sample is four deviations off."""
    place = tl.arange(0, _DIGIT)
    every, reached = _from_above(bins, _DIGIT)
    due, taken = tl.load(line + LAST), tl.load(line + ALIKE)
    doubt = (2 * tl.sqrt(taken.to(tl.float32)) + 4).to(tl.int64)
    first = tl.sum((reached >= due + doubt).to(tl.int32), 0) - 1
    steps = tl.sum((reached >= due - doubt).to(tl.int32), 0) - first
    hits = tl.sum(tl.where((place >= first) & (place < first + steps), every, 0), 0).to(tl.float32)
    length = tl.load(entry + LENGTH)
    bearable = hits * length.to(tl.float32) < taken.to(tl.float32) * (length // _SHARE + _CROWD).to(tl.float32)
    good = (first >= 0) & (due > doubt) & (steps <= _WIDEST) & bearable
    low = (tl.load(line + KEY).to(tl.int32) * _DIGIT + tl.maximum(first, 0)) << _BELOW
    more = (steps > 1).to(tl.int32) + (steps > 2) + (steps > 4) + (steps > 8) + (steps > 16)
    tl.store(line + BAR, low.to(tl.int64))
    tl.store(line + STEP, (more + 5).to(tl.int64))  # 2^15 keys in 1024 bins, or a few times as many
    tl.store(line + MISSED, tl.where(good, NEAR, LOST))


@triton.jit
def guess(x, table, chunk_segment, state, hist, SECOND: tl.constexpr, BLOCK: tl.constexpr):
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, line, bins = table + segment * COLUMNS, state + segment * COLUMNS, hist + segment * BINS
    key, inside = sampled(x, chunk, entry, BLOCK)
    place = tl.arange(0, _DIGIT)
    if SECOND:
        agrees = inside & (key >> _BELOW + 8 == tl.load(line + KEY).to(tl.int32))
        counts = tl.histogram(key >> _BELOW & _DIGIT - 1, _DIGIT, mask=agrees)
    else:
        counts = tl.histogram(key >> _BELOW + 8, _DIGIT, mask=inside)
    tl.atomic_add(bins + place, counts, mask=counts > 0, sem="relaxed")
    if is_last(entry, line):
        if SECOND:
            _range(entry, line, bins)
        else:
            _octave(entry, line, bins)
        tl.store(bins + place, tl.zeros([_DIGIT], tl.int32))
        tl.store(line + MET, 0)


@triton.jit
def _count(x, line, bins, chunk, entry, low, bits, limit, n, SECOND: tl.constexpr, BLOCK: tl.constexpr):
    base, start, stop = stretch(chunk, entry, BLOCK)
    over = tl.zeros([STRIDE], tl.int32)
    for i in range(0, (stop - base).to(tl.int32), STRIDE):
        value, inside = tile_of(x, base + i, start, stop, n, STRIDE)
        step = (key_of(value.to(tl.float32)) - low) >> bits
        tl.atomic_add(bins + step, 1, mask=inside & (step >= 0) & (step < limit), sem="relaxed")
        over += (inside & (step >= limit)).to(tl.int32)
    if not SECOND:
        tl.atomic_add(line + ABOVE, tl.sum(over, 0).to(tl.int64), sem="relaxed")


@triton.jit
def prove(x, edge, table, chunk_segment, state, hist, n, SECOND: tl.constexpr, BLOCK: tl.constexpr):
    """Find the step of the range that holds the last winner, or, the SECOND time, the key in that step."""
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, line, bins = table + segment * COLUMNS, state + segment * COLUMNS, hist + segment * BINS
    if tl.load(line + MISSED) == NEAR:
        low, bits = tl.load(line + BAR).to(tl.int32), tl.load(line + STEP).to(tl.int32)
        limit = 1 << bits if SECOND else bits * 0 + BINS
        if SECOND:
            bits = bits * 0
        _count(x, line, bins, chunk, entry, low, bits, limit, n, SECOND, BLOCK)
        if is_last(entry, line):
            wanted = tl.load(line + LAST) if SECOND else tl.load(entry + COUNT) - tl.load(line + ABOVE)
            every, reached = _from_above(bins, BINS)
            place = tl.sum((reached >= wanted).to(tl.int32), 0) - 1
            found = low + (tl.maximum(place, 0) << bits)
            tl.store(line + LAST, wanted - tl.sum(tl.where(tl.arange(0, BINS) > place, every, 0), 0))
            if SECOND:
                tl.store(line + KEY, found.to(tl.int64))
                tl.store(edge + segment, found.to(tl.float32, bitcast=True))
            else:
                tl.store(line + BAR, found.to(tl.int64))
                tl.store(line + MISSED, tl.where((wanted > 0) & (place >= 0), NEAR, LOST))
            tl.store(bins + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
            tl.store(line + ABOVE, 0)
            tl.store(line + MET, 0)
