"""After the pass over memory: bring the candidates that it set aside together, chunk by chunk.

A candidate's bits go with its place into the segment's room: chunks in any order, but each chunk's together and
rising. Bins of the range are counted on the way; the last program of a segment says in which one the count is
reached.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.topk.mark import COUNTED, NEVER
from gradwire.kernels.cuda.topk.sample import is_last
from gradwire.kernels.cuda.topk.workspace import (
    ABOVE,
    APART,
    BITS,
    CHUNK,
    CHUNKS,
    COLUMNS,
    COUNT,
    CUT,
    FEW_BINS,
    FINE_BINS,
    FOUND,
    HIGH,
    LENGTH,
    LOW,
    OVER,
    PARTS,
    ROOM,
    ROW,
    ROW_END,
    ROWS,
    SLAB,
    SLOT,
    START,
    TOP,
    WITHIN,
)

_TOGETHER = tl.constexpr(4096)  # slots that are looked at together
_WIDE = tl.constexpr(512)  # candidates, likewise
_NUMBER = tl.constexpr((1 << COUNTED.value) - 1)
_SLABS = tl.constexpr(ROWS.value * PARTS.value)  # of a chunk


@triton.jit
def fine_bin(key, low, bits, top):
    return tl.minimum((key - low) >> bits, top)


@triton.jit
def first_row(chunk, entry):
    """The first row of a chunk, and the one after its last."""
    row = tl.load(entry + ROW) + (chunk - tl.load(entry + CHUNK)) * ROWS
    return row, tl.minimum(row + ROWS, tl.load(entry + ROW_END))


@triton.jit
def cut_bins(line, fine, need, above, BINS: tl.constexpr):
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
def _count_bins(kept, number, low, bits, fine):
    """Count candidates in bins; in each chunk first, since all of them may fall into one bin."""
    counts = tl.zeros([FEW_BINS], tl.int32)
    for i in range(0, number, _WIDE):
        at = i + tl.arange(0, _WIDE)
        key = tl.load(kept + at, mask=at < number, other=0) & NEVER
        counts += tl.histogram(fine_bin(tl.maximum(key, low), low, bits, FEW_BINS - 1), FEW_BINS, mask=at < number)
    tl.atomic_add(fine + tl.arange(0, FEW_BINS) * APART, counts, mask=counts > 0, sem="relaxed")


@triton.jit
def _gather(words, slot_bits, slot_at, slabs, place, kept, places, SLOTS: tl.constexpr):
    """Bring together what slots hold. The first entry of the first slab has this place in the segment."""
    WIDTH: tl.constexpr = _SLABS if _SLABS * SLOTS <= _TOGETHER else _TOGETHER // SLOTS
    done = tl.zeros([], tl.int32)
    for i in tl.static_range(_SLABS // WIDTH):
        slab = i * WIDTH + tl.arange(0, WIDTH)
        number = tl.load(words + slab, mask=slab < slabs, other=0) & _NUMBER
        rank = tl.arange(0, SLOTS)[None, :]
        here = (rank < number[:, None]) & (number[:, None] <= SLOTS)
        slot = slab[:, None] * SLOTS + rank
        bits = tl.load(slot_bits + slot, mask=here, other=0)
        at = slab[:, None] * SLAB + tl.load(slot_at + slot, mask=here, other=0)
        to = (done + tl.cumsum(number, 0) - number)[:, None] + rank
        tl.store(kept + to, bits, mask=here)
        tl.store(places + to, (place + at).to(places.dtype.element_ty), mask=here)
        done += tl.sum(number, 0)


@triton.jit
def _read_again(x, words, tiles, place, length, low, last, kept, places, SLOTS: tl.constexpr):
    """Find the candidates of slabs that have more of them than slots."""
    done = tl.zeros([], tl.int32)
    for tile in range(tiles):
        number = tl.load(words + tile * PARTS + tl.arange(0, PARTS)) & _NUMBER
        if tl.max(number, 0) > SLOTS:
            at = (tile * PARTS + tl.arange(0, PARTS)[:, None]) * SLAB + tl.arange(0, SLAB)[None, :]
            inside = (place + at >= 0) & (place + at < length) & (number[:, None] > SLOTS)
            bits = tl.load(x + at, mask=inside, other=0.0).to(tl.float32).to(tl.int32, bitcast=True)
            hit = inside & ((bits & NEVER) >= low) & ((bits & NEVER) <= last)
            one = hit.to(tl.int32)
            to = (done + tl.cumsum(number, 0) - number)[:, None] + tl.cumsum(one, 1) - one
            tl.store(kept + to, bits, mask=hit)
            tl.store(places + to, (place + at).to(places.dtype.element_ty), mask=hit)
        done += tl.sum(number, 0)


@triton.jit
def compact(
    x, table, chunk_segment, state, fine, words, slot_bits, slot_at, base, count, kept, places, sure,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Bring a chunk's candidates together, as its words say."""
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, line = table + segment * COLUMNS, state + segment * COLUMNS
    fine += segment * FINE_BINS * APART
    row, end = first_row(chunk, entry)
    tiles = (end - row).to(tl.int32)
    words += row * PARTS
    slab = tl.arange(0, _SLABS)
    word = tl.load(words + slab, mask=slab < tiles * PARTS, other=0)
    total, above = tl.sum(word & _NUMBER, 0), tl.sum(word >> COUNTED, 0)
    tl.atomic_add(line + OVER, above.to(tl.int64), mask=above > 0, sem="relaxed")
    first = tl.zeros([], tl.int64)
    if total > 0:
        first = tl.atomic_add(line + FOUND, total.to(tl.int64), sem="relaxed")
    # A segment whose candidates exceed its room is read again by `radix`: nothing beyond the room need be put aside.
    if (total > 0) & (first + total <= tl.load(entry + ROOM)):
        start, slot = tl.load(entry + START), tl.load(entry + SLOT) + first
        kept += slot
        places += slot
        # The chunk's first tile may begin before the segment: then places there are negative.
        tile = start // BLOCK + row - tl.load(entry + ROW)
        place = tile * BLOCK - start
        low, high, bits = tl.load(line + LOW).to(tl.int32), tl.load(line + HIGH), tl.load(line + BITS).to(tl.int32)
        slots = row * (PARTS * SLOTS)
        _gather(words, slot_bits + slots, slot_at + slots, tiles * PARTS, place, kept, places, SLOTS)
        if tl.max(word & _NUMBER, 0) > SLOTS:
            last = tl.where(high == NEVER, high, high - 1).to(tl.int32)
            _read_again(x + tile * BLOCK, words, tiles, place, tl.load(entry + LENGTH), low, last, kept, places, SLOTS)
        tl.debug_barrier()
        _count_bins(kept, total, low, bits, fine)
    tl.store(base + chunk, first)
    tl.store(count + chunk, total)
    tl.store(sure + chunk, above)
    if is_last(line, tl.load(entry + CHUNKS)):
        tl.store(line + TOP, tl.zeros([], tl.int64) + (FEW_BINS - 1))
        cut_bins(line, fine, tl.load(entry + COUNT) - tl.load(line + OVER), tl.zeros([], tl.int64), FEW_BINS)
