"""After the sweep: put the candidates that it marked aside, chunk by chunk.

A candidate's key, the magnitude's bits, goes with its place into the segment's room: chunks in any order, but each
chunk's together and rising. Fine bins above the bar are counted on the way.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.plan import (
    ABOVE,
    APART,
    BINS,
    CAME,
    CHUNK,
    CHUNKS,
    COLUMNS,
    COUNT,
    CUT,
    FOUND,
    LENGTH,
    ROOM,
    ROW,
    ROW_END,
    ROWS,
    SLOT,
    SPAN,
    START,
    WITHIN,
)
from gradwire.kernels.cuda.sweep import BAD, COUNTED, GROUP, bar_of, key_of

_FIRST_BITS = tl.constexpr(14)  # of a key, below its fine bin, for a bar that comes from a sample
_ALL_BITS = tl.constexpr(21)  # the same for the lowest bar: bins for all there is
_WIDE = tl.constexpr(256)  # groups that are looked at together
_MARKS = tl.constexpr((1 << COUNTED.value) - 1)
_NUMBER = tl.constexpr((1 << BAD.value - COUNTED.value) - 1)


@triton.jit
def fine_bits(edge, bar, segment):
    """Bits of a key below its fine bin, such that 128 to 256 bins lie between the bar and the last step's edge."""
    reach = key_of(tl.minimum(tl.load(edge + segment), 3e38)) - bar
    length = (reach.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126
    return tl.where(reach > 0, tl.maximum(length - 8, 0), tl.where(bar > 1, _FIRST_BITS, _ALL_BITS))


@triton.jit
def fine_bin(key, bar, bits):
    return tl.minimum((key - bar) >> bits, BINS - 1)


@triton.jit
def count_from_above(fine):
    """How many candidates each fine bin has, and how many lie in it or above it."""
    counts = tl.load(fine + tl.arange(0, BINS) * APART)
    return counts, tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts


@triton.jit
def close(entry, line, fine):
    """The program that comes last says in which bin the count is reached, and how many lie there and above."""
    tl.debug_barrier()
    if tl.atomic_add(line + CAME, 1) == tl.load(entry + CHUNKS) - 1:
        tl.debug_barrier()
        counts, reached = count_from_above(fine)
        cut = tl.sum((reached >= tl.load(entry + COUNT)).to(tl.int32), 0) - 1
        tl.store(line + CUT, cut.to(tl.int64))
        tl.store(line + ABOVE, tl.sum(tl.where(tl.arange(0, BINS) > cut, counts, 0), 0).to(tl.int64))
        tl.store(line + WITHIN, tl.sum(tl.where(tl.arange(0, BINS) == cut, counts, 0), 0).to(tl.int64))
        tl.store(line + CAME, 0)


@triton.jit
def first_row(chunk, entry):
    """The first row of a chunk, and the one after its last."""
    row = tl.load(entry + ROW) + (chunk - tl.load(entry + CHUNK)) * ROWS
    return row, tl.minimum(row + ROWS, tl.load(entry + ROW_END))


@triton.jit
def _ones(x):
    """How many of the lower 16 bits are set."""
    x = x - (x >> 1 & 0x5555)
    x = (x & 0x3333) + (x >> 2 & 0x3333)
    x = (x + (x >> 4)) & 0x0F0F
    return (x + (x >> 8)) & 0x1F


@triton.jit
def _unfold(word, left, groups, WORDS: tl.constexpr):
    """Write down the numbers of the marked groups, and count them."""
    marks = word & _MARKS
    number = _ones(marks)
    rank = tl.cumsum(number, 0) - number
    for _ in range(tl.max(number, 0)):
        lowest = marks & -marks
        bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        group = tl.arange(0, WORDS) * (SPAN // GROUP) + bit
        tl.store(groups + rank, group.to(groups.dtype.element_ty), mask=(lowest != 0) & (rank < left))
        rank += (lowest != 0).to(tl.int32)
        marks = marks ^ lowest
    return tl.sum(number, 0)


@triton.jit
def _look(x, place, length, bar, bits, number, left, groups, keys, places, fine, HIST: tl.constexpr):
    """Keep the candidates among marked groups of entries; the first entry, ``x``, has this place in the segment."""
    done = tl.zeros([], tl.int32)
    for i in range(0, number, _WIDE):
        j = i + tl.arange(0, _WIDE)
        at = tl.load(groups + j, mask=j < number, other=0)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (j < number)[:, None] & (place + at >= 0) & (place + at < length)
        key = key_of(tl.load(x + at, mask=inside, other=0.0).to(tl.float32))
        hit = inside & (key >= bar)
        here = hit.to(tl.int32)
        several = tl.sum(here, 1)
        rank = (done + tl.cumsum(several, 0) - several)[:, None] + tl.cumsum(here, 1) - here
        kept = hit & (rank < left)
        tl.store(keys + rank, key, mask=kept)
        tl.store(places + rank, (place + at).to(places.dtype.element_ty), mask=kept)
        if HIST:
            bin = fine_bin(tl.where(hit, key, bar), bar, bits)
            tl.atomic_add(fine + bin * APART, 1, mask=hit, sem="relaxed")
        done += tl.sum(several, 0)


@triton.jit
def collect_chunk(
    x, chunk, entry, bar, bits, counter, fine, broken, words, base, count, keys, places, groups,
    HIST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put a chunk's candidates aside, as its words say. ``groups`` is scratch, of the size of ``places``."""
    WORDS: tl.constexpr = ROWS * (BLOCK // SPAN)
    row, end = first_row(chunk, entry)
    start, slot = tl.load(entry + START), tl.load(entry + SLOT)
    place = tl.arange(0, WORDS)
    live = place < (end - row).to(tl.int32) * (BLOCK // SPAN)
    word = tl.load(words + row * (BLOCK // SPAN) + place, mask=live, other=0)
    if tl.max(word >> BAD, 0) > 0:
        tl.store(broken, 1)
    total = tl.sum(word >> COUNTED & _NUMBER, 0)
    first = tl.zeros([], tl.int64)
    if total > 0:
        first = tl.atomic_add(counter, total.to(tl.int64), sem="relaxed")
        left = tl.minimum(tl.maximum(tl.load(entry + ROOM) - first, 0), total).to(tl.int32)
        number = _unfold(word, left, groups + slot + first, WORDS)
        tl.debug_barrier()
        # The chunk's first tile may begin before the segment: then places there are negative.
        tile = start // BLOCK + row - tl.load(entry + ROW)
        _look(
            x + tile * BLOCK, tile * BLOCK - start, tl.load(entry + LENGTH), bar, bits, tl.minimum(number, left), left,
            groups + slot + first, keys + slot + first, places + slot + first, fine, HIST,
        )  # fmt: skip
    tl.store(base + chunk, first)
    tl.store(count + chunk, total)


@triton.jit
def collect(
    x, edge, table, chunk_segment, slack, state, fine, broken, words, base, count, keys, places, groups,
    BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, line = table + segment * COLUMNS, state + segment * COLUMNS
    bar = bar_of(edge, slack, segment)
    bits = fine_bits(edge, bar, segment)
    fine += segment * BINS * APART
    collect_chunk(
        x, chunk, entry, bar, bits, line + FOUND, fine, broken, words, base, count, keys, places, groups, True, BLOCK
    )
    close(entry, line, fine)
