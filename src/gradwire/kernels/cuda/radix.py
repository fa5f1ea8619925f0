"""Exact top-k where many are wanted: nothing is put aside, and everything is read several times.

The last winner's key, the magnitude's bits, is found a digit at a time: programs count the digits of all entries that
agree with it so far, and the one that comes last in a segment decides. Then each chunk counts its winners and its
ties, and writes the winners down, in the order of their places. What it takes does not depend on the values.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.collect import first_row
from gradwire.kernels.cuda.emit import pass_over
from gradwire.kernels.cuda.plan import (
    BINS,
    CHUNK,
    CHUNKS,
    COLUMNS,
    COUNT,
    KEY,
    LAST,
    LENGTH,
    MET,
    OUT,
    ROW,
    START,
)
from gradwire.kernels.cuda.sweep import key_of

DIGITS = ((23, 8), (15, 8), (7, 8), (0, 7))  # of a key's 31 bits: how many lie below the digit, and how many it has
_TILE = tl.constexpr(4096)  # entries that are looked at together; at least those of a row
_MANY = tl.constexpr(2048)  # chunks, likewise


@triton.jit
def _stretch(chunk, entry, BLOCK: tl.constexpr):
    """Where a chunk's first tile starts in the buffer, and where the chunk's entries start and stop."""
    row, end = first_row(chunk, entry)
    start = tl.load(entry + START)
    base = (start // BLOCK + row - tl.load(entry + ROW)) * BLOCK
    stop = tl.minimum(base + (end - row) * BLOCK, start + tl.load(entry + LENGTH))
    return base, start, stop


@triton.jit
def _tile(x, base, start, stop, n):
    """What lies in the buffer from ``base`` on, and which of it between ``start`` and ``stop``."""
    at = tl.arange(0, _TILE)
    # Without a mask values come four at a time; beyond the segment they may, beyond the buffer they may not.
    value = tl.load(x + base + at) if base + _TILE <= n else tl.load(x + base + at, mask=at < n - base, other=0.0)
    first, end = tl.maximum(start - base, 0).to(tl.int32), tl.minimum(stop - base, _TILE).to(tl.int32)
    return value, (at >= first) & (at < end)


@triton.jit
def _is_last(entry, line):
    """Whether all other programs of the segment are done."""
    tl.debug_barrier()
    last = tl.atomic_add(line + MET, 1) == tl.load(entry + CHUNKS) - 1
    tl.debug_barrier()
    return last


@triton.jit
def tally(
    x, edge, table, chunk_segment, state, hist, n, SHIFT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Find the next digit of every segment's last winner; LAST holds how many of the winners agree with it so far."""
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, line, bins = table + segment * COLUMNS, state + segment * COLUMNS, hist + segment * BINS
    place = tl.arange(0, 1 << BITS)
    if SHIFT + BITS == 31:
        known, wanted = tl.zeros([], tl.int32), tl.load(entry + COUNT)
    else:
        known, wanted = tl.load(line + KEY).to(tl.int32), tl.load(line + LAST)
    base, start, stop = _stretch(chunk, entry, BLOCK)
    counts = tl.zeros([1 << BITS], tl.int32)
    for i in range(0, (stop - base).to(tl.int32), _TILE):
        value, inside = _tile(x, base + i, start, stop, n)
        key = key_of(value.to(tl.float32))
        agrees = inside & ((key >> (SHIFT + BITS)) == known)
        counts += tl.histogram((key >> SHIFT) & ((1 << BITS) - 1), 1 << BITS, mask=agrees)
    tl.atomic_add(bins + place, counts, mask=counts > 0, sem="relaxed")
    if _is_last(entry, line):
        every = tl.load(bins + place).to(tl.int64)
        reached = tl.sum(every, 0) - tl.cumsum(every, 0) + every
        digit = tl.sum((reached >= wanted).to(tl.int32), 0) - 1
        longer = (known << BITS) | digit
        tl.store(line + KEY, longer.to(tl.int64))
        tl.store(line + LAST, wanted - tl.sum(tl.where(place > digit, every, 0), 0))
        tl.store(bins + place, tl.zeros([1 << BITS], tl.int32))
        tl.store(line + MET, 0)
        if SHIFT == 0:
            tl.store(edge + segment, longer.to(tl.float32, bitcast=True))


@triton.jit
def weigh(x, table, chunk_segment, state, over, tied, overs, ties, n, BLOCK: tl.constexpr):
    """How many of each chunk lie above the last winner, and how many tie with it; then, how many before each chunk."""
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, line = table + segment * COLUMNS, state + segment * COLUMNS
    low = tl.load(line + KEY).to(tl.int32)
    base, start, stop = _stretch(chunk, entry, BLOCK)
    above, equal = tl.zeros([_TILE], tl.int32), tl.zeros([_TILE], tl.int32)
    for i in range(0, (stop - base).to(tl.int32), _TILE):
        value, inside = _tile(x, base + i, start, stop, n)
        key = key_of(value.to(tl.float32))
        above += (inside & (key > low)).to(tl.int32)
        equal += (inside & (key == low)).to(tl.int32)
    tl.store(over + chunk, tl.sum(above, 0))
    tl.store(tied + chunk, tl.sum(equal, 0))
    if _is_last(entry, line):
        first, chunks = tl.load(entry + CHUNK), tl.load(entry + CHUNKS).to(tl.int32)
        _add_up(over + first, overs + first, chunks, tl.load(entry + OUT))
        _add_up(tied + first, ties + first, chunks, tl.zeros([], tl.int64))
        tl.store(line + MET, 0)


@triton.jit
def _add_up(numbers, sums, count, before):
    """Sums of all numbers in front of each."""
    for i in range(0, count, _MANY):
        at = i + tl.arange(0, _MANY)
        number = tl.load(numbers + at, mask=at < count, other=0, volatile=True).to(tl.int64)
        tl.store(sums + at, before + tl.cumsum(number, 0) - number, mask=at < count)
        before += tl.sum(number, 0)


@triton.jit
def write(
    x, momentum, edge, indices, values, table, chunk_segment, segments, state, overs, ties, n,
    VALUES: tl.constexpr, SETTLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the winners down, and settle them as `emit` does."""
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, line = table + segment * COLUMNS, state + segment * COLUMNS
    low, left = tl.load(line + KEY).to(tl.int32), tl.load(line + LAST)
    to, seen = tl.load(overs + chunk), tl.load(ties + chunk)
    base, start, stop = _stretch(chunk, entry, BLOCK)
    at = tl.arange(0, _TILE)
    for i in range(0, (stop - base).to(tl.int32), _TILE):
        value, inside = _tile(x, base + i, start, stop, n)
        key = key_of(value.to(tl.float32))
        above, equal = inside & (key > low), inside & (key == low)
        both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
        sums = tl.cumsum(both, 0) - both  # both before each entry, by one scan
        rank = seen + (sums >> 16)
        won = above | (equal & (rank < left))
        slot = to + (sums & 0xFFFF) + tl.minimum(rank, left)
        tl.store(indices + slot, base + i + at, mask=won)
        if VALUES:
            tl.store(values + slot, value, mask=won)
        if SETTLE > 0:  # what is sent as it is leaves nothing, unless it was infinite
            tl.store(x + base + i + at, value - value, mask=won)
        if SETTLE > 1:
            tl.store(momentum + base + i + at, tl.zeros_like(value), mask=won)
        met = tl.sum(both, 0)
        to += met & 0xFFFF
        seen += met >> 16
    if chunk == 0:
        pass_over(edge, table, segments)
