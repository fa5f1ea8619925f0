"""Exact top-k where many are wanted, or are equal: nothing is put aside, and everything is read several times.

The last winner's key, the magnitude's bits, is found a digit at a time: programs count the digits of all entries that
agree with it so far, and the one that comes last in a segment decides. Then each chunk counts its winners and its
ties, and writes the winners down, in the order of their places. What it takes hardly depends on the values. Segments
that `narrow` has done with are passed over.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.collect import first_row
from gradwire.kernels.cuda.plan import (
    ALIKE,
    BINS,
    CHUNK,
    CHUNKS,
    COLUMNS,
    COUNT,
    KEY,
    LAST,
    LENGTH,
    LOST,
    MET,
    MISSED,
    NEAR,
    OUT,
    ROW,
    START,
)
from gradwire.kernels.cuda.sweep import key_of

DIGITS = ((23, 8), (15, 8), (7, 8), (0, 7))  # of a key's 31 bits: how many lie below the digit, and how many it has
STRIDE = tl.constexpr(4096)  # entries that are looked at together
_MANY = tl.constexpr(1024)  # chunks, likewise
_SELDOM = tl.constexpr(256)  # where no more than one of so many entries counts, they are counted one by one
_MOST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def stretch(chunk, entry, BLOCK: tl.constexpr):
    """Where a chunk's first tile starts in the buffer, and where the chunk's entries start and stop."""
    row, end = first_row(chunk, entry)
    start = tl.load(entry + START)
    base = (start // BLOCK + row - tl.load(entry + ROW)) * BLOCK
    stop = tl.minimum(base + (end - row) * BLOCK, start + tl.load(entry + LENGTH))
    return base, start, stop


@triton.jit
def tile_of(x, base, start, stop, n, TILE: tl.constexpr):
    """What lies in the buffer from ``base`` on, and which of it between ``start`` and ``stop``."""
    at = tl.arange(0, TILE)
    # Without a mask values come four at a time; beyond the segment they may, beyond the buffer they may not.
    value = tl.load(x + base + at) if base + TILE <= n else tl.load(x + base + at, mask=at < n - base, other=0.0)
    first, end = tl.maximum(start - base, 0).to(tl.int32), tl.minimum(stop - base, TILE).to(tl.int32)
    return value, (at >= first) & (at < end)


@triton.jit
def is_last(entry, line):
    """Whether all other programs of the segment are done."""
    tl.debug_barrier()
    last = tl.atomic_add(line + MET, 1) == tl.load(entry + CHUNKS) - 1
    tl.debug_barrier()
    return last


@triton.jit
def _count(
    x, bins, chunk, entry, known, n, SELDOM: tl.constexpr, SHIFT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Count the digits of a chunk's entries that agree with what is known. SELDOM: few do."""
    base, start, stop = stretch(chunk, entry, BLOCK)
    counts = tl.zeros([1 << BITS], tl.int32)
    for i in range(0, (stop - base).to(tl.int32), STRIDE):
        value, inside = tile_of(x, base + i, start, stop, n, STRIDE)
        key = key_of(value.to(tl.float32))
        digit = (key >> SHIFT) & ((1 << BITS) - 1)
        agrees = inside & ((key >> (SHIFT + BITS)) == known)
        if SELDOM:
            tl.atomic_add(bins + digit, 1, mask=agrees, sem="relaxed")
        else:
            counts += tl.histogram(digit, 1 << BITS, mask=agrees)
    if not SELDOM:
        tl.atomic_add(bins + tl.arange(0, 1 << BITS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _choose(entry, line, bins, known, wanted, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """The digit at which ``wanted`` are reached from above. Returns the key so far."""
    place = tl.arange(0, 1 << BITS)
    every = tl.load(bins + place).to(tl.uint32, bitcast=True).to(tl.int64)
    reached = tl.sum(every, 0) - tl.cumsum(every, 0) + every
    digit = tl.sum((reached >= wanted).to(tl.int32), 0) - 1
    longer = (known << BITS) | digit
    tl.store(line + KEY, longer.to(tl.int64))
    tl.store(line + LAST, wanted - tl.sum(tl.where(place > digit, every, 0), 0))
    tl.store(line + ALIKE, tl.sum(tl.where(place == digit, every, 0), 0))
    tl.store(bins + place, tl.zeros([1 << BITS], tl.int32))
    return longer


@triton.jit
def tally(
    x, edge, table, chunk_segment, state, hist, n, SHIFT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Find the next digit of every segment's last winner; LAST holds how many of the winners agree with it so far."""
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, line, bins = table + segment * COLUMNS, state + segment * COLUMNS, hist + segment * BINS
    if tl.load(line + MISSED) == LOST:
        if SHIFT + BITS == 31:
            known, wanted = tl.zeros([], tl.int32), tl.load(entry + COUNT)
            _count(x, bins, chunk, entry, known, n, False, SHIFT, BITS, BLOCK)
        else:
            known, wanted = tl.load(line + KEY).to(tl.int32), tl.load(line + LAST)
            if tl.load(line + ALIKE) * _SELDOM <= tl.load(entry + LENGTH):
                _count(x, bins, chunk, entry, known, n, True, SHIFT, BITS, BLOCK)
            else:
                _count(x, bins, chunk, entry, known, n, False, SHIFT, BITS, BLOCK)
        if is_last(entry, line):
            longer = _choose(entry, line, bins, known, wanted, SHIFT, BITS)
            tl.store(line + MET, 0)
            if SHIFT == 0:
                tl.store(edge + segment, longer.to(tl.float32, bitcast=True))


@triton.jit
def weigh(x, table, chunk_segment, state, over, tied, out, n, BLOCK: tl.constexpr):
    """How many of each chunk lie above the last winner, and how many tie with it; then, where they go."""
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, line = table + segment * COLUMNS, state + segment * COLUMNS
    missed = tl.load(line + MISSED)
    if (missed == LOST) | (missed == NEAR):
        low = tl.load(line + KEY).to(tl.int32)
        base, start, stop = stretch(chunk, entry, BLOCK)
        both = tl.zeros([STRIDE], tl.int32)
        for i in range(0, (stop - base).to(tl.int32), STRIDE):
            value, inside = tile_of(x, base + i, start, stop, n, STRIDE)
            key = key_of(value.to(tl.float32))
            both += tl.where(inside & (key >= low), tl.where(key > low, 1, 0x10000), 0)
        tl.store(over + chunk, tl.sum(both & 0xFFFF, 0))
        tl.store(tied + chunk, tl.sum(both >> 16, 0))
        if is_last(entry, line):
            first, chunks = tl.load(entry + CHUNK), tl.load(entry + CHUNKS).to(tl.int32)
            share_out(over + first, tied + first, out + first, chunks, tl.load(entry + OUT), tl.load(line + LAST))
            tl.store(line + MET, 0)


@triton.jit
def share_out(over, tied, out, chunks, to, left):
    """Where each chunk's winners go; and, in place of how many tie there, how many of those win. In all ``left`` do."""
    seen = to * 0
    for i in range(0, chunks, _MANY):
        at = i + tl.arange(0, _MANY)
        number = tl.load(over + at, mask=at < chunks, other=0, volatile=True).to(tl.int64)
        equal = tl.load(tied + at, mask=at < chunks, other=0, volatile=True).to(tl.int64)
        before = seen + tl.cumsum(equal, 0) - equal
        tl.store(out + at, to + tl.cumsum(number, 0) - number + tl.minimum(before, left), mask=at < chunks)
        tl.store(tied + at, tl.minimum(tl.maximum(left - before, 0), equal).to(tl.int32), mask=at < chunks)
        to += tl.sum(number, 0)
        seen += tl.sum(equal, 0)


@triton.jit
def write_chunk(
    x, momentum, chunk, entry, low, ties, to, indices, values, n,
    VALUES: tl.constexpr, SETTLE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write down what lies above the last winner, and the first few that tie with it; settle them as `emit` does."""
    base, start, stop = stretch(chunk, entry, BLOCK)
    at = tl.arange(0, TILE)
    for i in range(0, (stop - base).to(tl.int32), TILE):
        value, inside = tile_of(x, base + i, start, stop, n, TILE)
        key = key_of(value.to(tl.float32))
        above, equal = inside & (key > low), inside & (key == low)
        both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
        sums = tl.cumsum(both, 0) - both  # both before each entry, by one scan
        won = above | (equal & ((sums >> 16) < ties))
        slot = (sums & 0xFFFF) + tl.minimum(sums >> 16, ties)
        tl.store(indices + to + slot, base + i + at, mask=won)
        if VALUES:
            tl.store(values + to + slot, value, mask=won)
        if SETTLE > 0:  # what is sent as it is leaves nothing, unless it was infinite
            tl.store(x + base + i + at, value - value, mask=won)
        if SETTLE > 1:
            tl.store(momentum + base + i + at, tl.zeros_like(value), mask=won)
        met = tl.sum(both, 0)
        to += (met & 0xFFFF) + tl.minimum(met >> 16, ties)
        ties -= tl.minimum(met >> 16, ties)


@triton.jit
def pass_over(edge, table, segments):
    """Give an edge to segments of which nothing is wanted: they have no program of their own."""
    for i in range(0, segments, 128):
        at = i + tl.arange(0, 128)
        none = (at < segments) & (tl.load(table + at * COLUMNS + COUNT, mask=at < segments, other=1) == 0)
        tl.store(edge + at, tl.full([128], _MOST, tl.float32), mask=none)


@triton.jit
def write(
    x, momentum, edge, indices, values, table, chunk_segment, segments, state, tied, out, n,
    VALUES: tl.constexpr, SETTLE: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, low = table + segment * COLUMNS, tl.load(state + segment * COLUMNS + KEY).to(tl.int32)
    ties, to = tl.load(tied + chunk), tl.load(out + chunk)
    write_chunk(x, momentum, chunk, entry, low, ties, to, indices, values, n, VALUES, SETTLE, TILE, BLOCK)
    if chunk == 0:
        pass_over(edge, table, segments)
