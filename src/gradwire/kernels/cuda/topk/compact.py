"""After the pass over memory: put the candidates that it marked aside, chunk by chunk.

A candidate's key goes with its place into the segment's room: chunks in any order, but each chunk's together and
rising. Fine bins of the range are counted on the way; the last program of a segment says in which one the count is
reached.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.topk.mark import BAD, COUNTED, GROUP, NEVER, key_of
from gradwire.kernels.cuda.topk.sample import is_last
from gradwire.kernels.cuda.topk.workspace import (
    ABOVE,
    APART,
    BINS,
    BITS,
    CHUNK,
    CHUNKS,
    COLUMNS,
    COUNT,
    CUT,
    FOUND,
    HIGH,
    LENGTH,
    LOW,
    OVER,
    ROOM,
    ROW,
    ROW_END,
    ROWS,
    SLOT,
    SPAN,
    START,
    TOP,
    WITHIN,
)

_WIDE = tl.constexpr(256)  # groups that are looked at together
_FEW = tl.constexpr(256)  # candidates that are counted together; no more than these, one by one
_MARKS = tl.constexpr((1 << COUNTED.value) - 1)
_NUMBER = tl.constexpr((1 << BAD.value - COUNTED.value) - 1)


@triton.jit
def fine_bin(key, low, bits, top):
    return tl.minimum((key - low) >> bits, top)


@triton.jit
def first_row(chunk, entry):
    """The first row of a chunk, and the one after its last."""
    row = tl.load(entry + ROW) + (chunk - tl.load(entry + CHUNK)) * ROWS
    return row, tl.minimum(row + ROWS, tl.load(entry + ROW_END))


@triton.jit
def _cut(entry, line, fine):
    """Say in which bin the count is reached, and how many candidates lie there and above."""
    tl.store(line + TOP, tl.zeros([], tl.int64) + (BINS - 1))
    cut_bins(line, fine, tl.load(entry + COUNT) - tl.load(line + OVER), tl.zeros([], tl.int64))


@triton.jit
def cut_bins(line, fine, need, above):
    """Say in which bin ``need`` candidates are reached, where ``above`` lie above all bins; and clear the bins."""
    place = tl.arange(0, BINS)
    counts = tl.load(fine + place * APART, volatile=True)
    reached = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
    cut = tl.sum((reached >= need - above).to(tl.int32), 0) - 1
    tl.store(line + CUT, cut.to(tl.int64))
    tl.store(line + ABOVE, above + tl.sum(tl.where(place > cut, counts, 0), 0).to(tl.int64))
    tl.store(line + WITHIN, tl.sum(tl.where(place == cut, counts, 0), 0).to(tl.int64))
    tl.debug_barrier()
    tl.store(fine + place * APART, tl.zeros([BINS], tl.int32))


@triton.jit
def _ones(x):
    """How many of the lower 16 bits are set."""
    x = x - (x >> 1 & 0x5555)
    x = (x & 0x3333) + (x >> 2 & 0x3333)
    x = (x + (x >> 4)) & 0x0F0F
    return (x + (x >> 8)) & 0x1F


@triton.jit
def _unfold(word, groups, WORDS: tl.constexpr):
    """Write down the numbers of the marked groups, and count them."""
    marks = word & _MARKS
    number = _ones(marks)
    rank = tl.cumsum(number, 0) - number
    for _ in range(tl.max(number, 0)):
        lowest = marks & -marks
        bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
        group = tl.arange(0, WORDS) * (SPAN // GROUP) + bit
        tl.store(groups + rank, group.to(groups.dtype.element_ty), mask=lowest != 0)
        rank += (lowest != 0).to(tl.int32)
        marks = marks ^ lowest
    return tl.sum(number, 0)


@triton.jit
def _count_bins(keys, number, low, bits, fine):
    """Count the keys of candidates in fine bins. Many may fall into one, where they would wait for each other."""
    if number > _FEW:
        counts = tl.zeros([BINS], tl.int32)
        for i in range(0, number, _FEW):
            at = i + tl.arange(0, _FEW)
            key = tl.load(keys + at, mask=at < number, other=0)
            counts += tl.histogram(fine_bin(tl.maximum(key, low), low, bits, BINS - 1), BINS, mask=at < number)
        tl.atomic_add(fine + tl.arange(0, BINS) * APART, counts, mask=counts > 0, sem="relaxed")
    else:
        at = tl.arange(0, _FEW)
        key = tl.load(keys + at, mask=at < number, other=0)
        bin = fine_bin(tl.maximum(key, low), low, bits, BINS - 1)
        tl.atomic_add(fine + bin * APART, 1, mask=at < number, sem="relaxed")


@triton.jit
def _keep_candidates(x, place, length, low, last, number, groups, keys, places):
    """Keep the candidates among marked groups of entries, and count them.

    The first entry, ``x``, has this place in the segment.
    """
    done = tl.zeros([], tl.int32)
    for i in range(0, number, _WIDE):
        j = i + tl.arange(0, _WIDE)
        at = tl.load(groups + j, mask=j < number, other=0)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
        inside = (j < number)[:, None] & (place + at >= 0) & (place + at < length)
        key = key_of(tl.load(x + at, mask=inside, other=0.0).to(tl.float32))
        hit = inside & (key >= low) & (key <= last)
        one = hit.to(tl.int32)
        several = tl.sum(one, 1)
        rank = (done + tl.cumsum(several, 0) - several)[:, None] + tl.cumsum(one, 1) - one
        tl.store(keys + rank, key, mask=hit)
        tl.store(places + rank, (place + at).to(places.dtype.element_ty), mask=hit)
        done += tl.sum(several, 0)
    return done


@triton.jit
def compact(
    x, table, chunk_segment, state, fine, nonfinite, words, over, base, count, keys, places, groups, sure,
    DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Put a chunk's candidates aside, as its words say. ``groups`` is scratch, of the size of ``places``."""
    WORDS: tl.constexpr = ROWS * (BLOCK // SPAN)
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, line = table + segment * COLUMNS, state + segment * COLUMNS
    fine += segment * BINS * APART
    row, end = first_row(chunk, entry)
    word_at = row * (BLOCK // SPAN) + tl.arange(0, WORDS)
    live = tl.arange(0, WORDS) < (end - row).to(tl.int32) * (BLOCK // SPAN)
    word = tl.load(words + word_at, mask=live, other=0)
    if tl.max(word >> BAD, 0) > 0:
        tl.store(nonfinite, 1)
    above = tl.zeros([], tl.int32)
    if DENSE:
        above = tl.sum(tl.load(over + word_at, mask=live, other=0), 0)
        tl.atomic_add(line + OVER, above.to(tl.int64), sem="relaxed")
    total = tl.sum(word >> COUNTED & _NUMBER, 0)
    first = tl.zeros([], tl.int64)
    if total > 0:
        first = tl.atomic_add(line + FOUND, total.to(tl.int64), sem="relaxed")
    # A segment whose candidates exceed its room is read again by `radix`: nothing beyond the room need be put aside.
    if (total > 0) & (first + total <= tl.load(entry + ROOM)):
        start, slot = tl.load(entry + START), tl.load(entry + SLOT)
        number = _unfold(word, groups + slot + first, WORDS)
        tl.debug_barrier()
        # The chunk's first tile may begin before the segment: then places there are negative.
        tile = start // BLOCK + row - tl.load(entry + ROW)
        low, high, bits = tl.load(line + LOW).to(tl.int32), tl.load(line + HIGH), tl.load(line + BITS).to(tl.int32)
        last = tl.where(high == NEVER, high, high - 1).to(tl.int32)
        number = _keep_candidates(
            x + tile * BLOCK, tile * BLOCK - start, tl.load(entry + LENGTH), low, last, number,
            groups + slot + first, keys + slot + first, places + slot + first,
        )  # fmt: skip
        tl.debug_barrier()
        _count_bins(keys + slot + first, number, low, bits, fine)
    tl.store(base + chunk, first)
    tl.store(count + chunk, total)
    tl.store(sure + chunk, above)
    if is_last(line, tl.load(entry + CHUNKS)):
        _cut(entry, line, fine)
