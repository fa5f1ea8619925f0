"""Where candidates were of no use: all programs read the segment again, and its values hardly matter to the time.

The first launch proves or refutes the guess of `threshold`, which is right where very many are equal. If it is wrong,
the last winner's key is found a digit at a time: programs count the digits of all entries that agree with it so far,
and the one that comes last in a segment decides. Then each chunk counts its winners and its ties. Segments that
`threshold` has done with are passed over, and a few programs look at one byte where it has done with all.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.topk.compact import first_row
from gradwire.kernels.cuda.topk.mark import key_of
from gradwire.kernels.cuda.topk.sample import is_last
from gradwire.kernels.cuda.topk.workspace import (
    CHUNK,
    CHUNKS,
    COLUMNS,
    COUNT,
    DIGIT_BINS,
    KEY,
    LARGER,
    LAST,
    LENGTH,
    MISSED,
    OUT,
    OUTCOME,
    PROVEN,
    ROW,
    START,
    TIED,
)

# Of a key's 31 bits: how many lie below the digit, and how many it has. A warp counts 64 values at the speed of memory.
DIGITS = ((25, 6), (19, 6), (13, 6), (7, 6), (0, 7))
_STRIDE = tl.constexpr(4096)  # entries that are looked at together
_MANY = tl.constexpr(1024)  # chunks, likewise
PROGRAMS = 528  # as many as an H200 runs side by side, and few where nothing is left to do


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
def _compared(key, inside, with_):
    """1 where a key is larger, 65536 where it ties: two numbers in one."""
    return tl.where(inside & (key >= with_), tl.where(key > with_, 1, 0x10000), 0)


@triton.jit
def share_out(larger, tied, out, chunks, to, left):
    """Where each chunk's winners go; and, in place of how many tie there, how many of those win. In all ``left`` do."""
    seen = to * 0
    for i in range(0, chunks, _MANY):
        at = i + tl.arange(0, _MANY)
        number = tl.load(larger + at, mask=at < chunks, other=0, volatile=True).to(tl.int64)
        equal = tl.load(tied + at, mask=at < chunks, other=0, volatile=True).to(tl.int64)
        before = seen + tl.cumsum(equal, 0) - equal
        tl.store(out + at, to + tl.cumsum(number, 0) - number + tl.minimum(before, left), mask=at < chunks)
        tl.store(tied + at, tl.minimum(tl.maximum(left - before, 0), equal).to(tl.int32), mask=at < chunks)
        to += tl.sum(number, 0)
        seen += tl.sum(equal, 0)


@triton.jit
def _share_out(entry, larger, tied, out, left):
    first, chunks = tl.load(entry + CHUNK), tl.load(entry + CHUNKS).to(tl.int32)
    share_out(larger + first, tied + first, out + first, chunks, tl.load(entry + OUT), left)


@triton.jit
def _choose(line, bins, known, wanted, SHIFT: tl.constexpr, BITS: tl.constexpr):
    """The digit at which ``wanted`` are reached from above. Returns the key so far."""
    place = tl.arange(0, 1 << BITS)
    counts = tl.load(bins + place)
    reached = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    digit = tl.sum((reached >= wanted).to(tl.int32), 0) - 1
    longer = (known << BITS) | digit
    tl.store(line + KEY, longer.to(tl.int64))
    tl.store(line + LAST, wanted - tl.sum(tl.where(place > digit, counts, 0), 0))


@triton.jit
def _first(x, chunk, entry, line, bins, larger, tied, out, n, SHIFT: tl.constexpr, BITS: tl.constexpr,
           BLOCK: tl.constexpr):  # fmt: skip
    """Prove the guessed key, and count first digits in case that it is wrong."""
    guess = tl.load(line + KEY).to(tl.int32)
    base, start, stop = stretch(chunk, entry, BLOCK)
    counts = tl.zeros([1 << BITS], tl.int32)
    both = tl.zeros([_STRIDE], tl.int32)
    for i in range(0, (stop - base).to(tl.int32), _STRIDE):
        value, inside = tile_of(x, base + i, start, stop, n, _STRIDE)
        key = key_of(value.to(tl.float32))
        both += _compared(key, inside, guess)
        counts += tl.histogram(key >> SHIFT, 1 << BITS, mask=inside)
    above, equal = tl.sum(both & 0xFFFF, 0), tl.sum(both >> 16, 0)
    tl.store(larger + chunk, above)
    tl.store(tied + chunk, equal)
    tl.atomic_add(line + LARGER, above.to(tl.int64), sem="relaxed")
    tl.atomic_add(line + TIED, equal.to(tl.int64), sem="relaxed")
    tl.atomic_add(bins + tl.arange(0, 1 << BITS), counts.to(tl.int64), mask=counts > 0, sem="relaxed")
    if is_last(line, tl.load(entry + CHUNKS)):
        wanted = tl.load(entry + COUNT)
        left = wanted - tl.load(line + LARGER)
        if (left > 0) & (left <= tl.load(line + TIED)):
            _share_out(entry, larger, tied, out, left)
            tl.store(line + OUTCOME, PROVEN)
        else:
            _choose(line, bins, guess * 0, wanted, SHIFT, BITS)
        tl.debug_barrier()
        tl.store(line + LARGER, 0)
        tl.store(line + TIED, 0)
        tl.store(bins + tl.arange(0, DIGIT_BINS), tl.zeros([DIGIT_BINS], tl.int64))


@triton.jit
def count_digits(
    x, table, chunk_segment, state, digits, larger, tied, out, flags, n, chunks,
    SHIFT: tl.constexpr, BITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the next digit of each last winner; LAST holds how many of the winners agree with it so far."""
    for chunk in range(tl.program_id(0), chunks * (tl.load(flags + 1) != 0), tl.num_programs(0)):
        segment = tl.load(chunk_segment + chunk)
        entry, line, bins = table + segment * COLUMNS, state + segment * COLUMNS, digits + segment * DIGIT_BINS
        if tl.load(line + OUTCOME) == MISSED:
            if SHIFT + BITS == 31:
                _first(x, chunk, entry, line, bins, larger, tied, out, n, SHIFT, BITS, BLOCK)
            else:
                known, wanted = tl.load(line + KEY).to(tl.int32), tl.load(line + LAST)
                base, start, stop = stretch(chunk, entry, BLOCK)
                counts = tl.zeros([1 << BITS], tl.int32)
                for i in range(0, (stop - base).to(tl.int32), _STRIDE):
                    value, inside = tile_of(x, base + i, start, stop, n, _STRIDE)
                    key = key_of(value.to(tl.float32))
                    agrees = inside & ((key >> (SHIFT + BITS)) == known)
                    counts += tl.histogram((key >> SHIFT) & ((1 << BITS) - 1), 1 << BITS, mask=agrees)
                tl.atomic_add(bins + tl.arange(0, 1 << BITS), counts.to(tl.int64), mask=counts > 0, sem="relaxed")
                if is_last(line, tl.load(entry + CHUNKS)):
                    _choose(line, bins, known, wanted, SHIFT, BITS)
                    tl.debug_barrier()
                    tl.store(bins + tl.arange(0, DIGIT_BINS), tl.zeros([DIGIT_BINS], tl.int64))


@triton.jit
def count_ties(x, table, chunk_segment, state, larger, tied, out, flags, n, chunks, BLOCK: tl.constexpr):
    """How many of each chunk lie above the last winner, and how many tie with it; then, where they go."""
    for chunk in range(tl.program_id(0), chunks * (tl.load(flags + 1) != 0), tl.num_programs(0)):
        segment = tl.load(chunk_segment + chunk)
        entry, line = table + segment * COLUMNS, state + segment * COLUMNS
        if tl.load(line + OUTCOME) == MISSED:
            low = tl.load(line + KEY).to(tl.int32)
            base, start, stop = stretch(chunk, entry, BLOCK)
            both = tl.zeros([_STRIDE], tl.int32)
            for i in range(0, (stop - base).to(tl.int32), _STRIDE):
                value, inside = tile_of(x, base + i, start, stop, n, _STRIDE)
                both += _compared(key_of(value.to(tl.float32)), inside, low)
            tl.store(larger + chunk, tl.sum(both & 0xFFFF, 0))
            tl.store(tied + chunk, tl.sum(both >> 16, 0))
            if is_last(line, tl.load(entry + CHUNKS)):
                _share_out(entry, larger, tied, out, tl.load(line + LAST))
