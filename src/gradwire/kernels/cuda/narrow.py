"""After the sweep: find each segment's last winner, and where each chunk's winners go.

Most candidates lie in bins that win or lose as a whole; programs count those, and put the rest aside once more. The
program that arrives last in a segment searches that rest. Where there were too few candidates, or too many to keep, it
finds a better bar, for another try.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.census import bar_for, count_chunk, first_row
from gradwire.kernels.cuda.plan import (
    BAR,
    BINS,
    BOUND,
    CHUNK,
    CHUNKS,
    COLUMNS,
    COUNT,
    FOUND,
    KEY,
    LAST,
    LENGTH,
    MET,
    MISSED,
    OUT,
    ROOM,
    ROWS,
    SLOT,
    START,
)
from gradwire.kernels.cuda.search import TOP, WIDTH, search, wins
from gradwire.kernels.cuda.sweep import FINE, bar_of, fine_bin

ACROSS = tl.constexpr(16)  # candidates of a row that are looked at together
BELOW = tl.constexpr((1 << FINE.value) - 1)


@triton.jit
def candidates(row, end, j, entry, row_base, row_count):
    """Slots of candidates j, j + 1, ... of each row of a chunk, [ROWS, ACROSS], and which of them are any."""
    rows = row + tl.arange(0, ROWS)
    base = tl.load(row_base + rows, mask=rows < end, other=0)
    count = tl.load(row_count + rows, mask=rows < end, other=0)
    across = j + tl.arange(0, ACROSS)
    slot = tl.load(entry + SLOT) + base[:, None] + across[None, :]
    return slot, across[None, :] < count[:, None]


@triton.jit
def most(row, end, row_count):
    rows = row + tl.arange(0, ROWS)
    return tl.max(tl.load(row_count + rows, mask=rows < end, other=0), 0)


@triton.jit
def _cut(hist, count):
    """The bin in which the count is reached from above, and how many lie above it."""
    bins = tl.arange(0, BINS)
    found = tl.load(hist + bins)
    above = tl.sum(found, 0) - tl.cumsum(found, 0)
    cut = tl.sum((above + found >= count).to(tl.int32), 0) - 1
    return cut, tl.sum(tl.where(bins > cut, found, 0), 0)


@triton.jit
def _weigh(chunk, entry, line, bar, cut, row_base, row_count, keys, places, bound_keys, bound_places, sure):
    """Count a chunk's sure winners; put those in the cut bin aside."""
    row, end = first_row(chunk, entry)
    winners = tl.zeros([ROWS * ACROSS], tl.int32)
    for j in range(0, most(row, end, row_count), ACROSS):
        slot, any_ = candidates(row, end, j, entry, row_base, row_count)
        slot = tl.reshape(slot, [ROWS * ACROSS])
        live = tl.reshape(any_, [ROWS * ACROSS])
        key = tl.load(keys + slot, mask=live, other=0)
        bin = fine_bin(key, bar)
        winners += (live & (bin > cut)).to(tl.int32)
        unsure = live & (bin == cut)
        number = tl.sum(unsure.to(tl.int32), 0)
        if number > 0:
            base = tl.atomic_add(line + BOUND, number.to(tl.int64), sem="relaxed") + tl.load(entry + SLOT)
            to = base + tl.cumsum(unsure.to(tl.int32), 0) - 1
            tl.store(bound_keys + to, key, mask=unsure)
            tl.store(bound_places + to, tl.load(places + slot, mask=unsure), mask=unsure)
    tl.store(sure + chunk, tl.sum(winners, 0))


@triton.jit
def _decide(entry, line, edge, bar, cut, above, keys, places, sure, out, BLOCK: tl.constexpr):
    """Search the cut bin, and add its winners to their chunks'; then sum up. Returns the last winner's key."""
    start, length, count = tl.load(entry + START), tl.load(entry + LENGTH), tl.load(line + BOUND).to(tl.int32)
    keys += tl.load(entry + SLOT)
    places += tl.load(entry + SLOT)
    low = bar + (cut << FINE)
    high = tl.where(cut == BINS - 1, TOP, low + BELOW)
    low, last = search(keys, places, count, tl.load(entry + COUNT) - above, low, high, length, False)
    tl.store(line + KEY, low.to(tl.int64))
    tl.store(line + LAST, last)
    tl.store(edge, low.to(tl.float32, bitcast=True))
    first, chunks = tl.load(entry + CHUNK), tl.load(entry + CHUNKS).to(tl.int32)
    for i in range(0, count, WIDTH):
        at = i + tl.arange(0, WIDTH)
        live = at < count
        place = tl.load(places + at, mask=live, other=0).to(tl.int64)
        won = live & wins(tl.load(keys + at, mask=live, other=-1), place, low, last)
        chunk = first + ((start + place) // BLOCK - start // BLOCK) // ROWS
        tl.atomic_add(sure + chunk, 1, mask=won)
    tl.debug_barrier()
    to = tl.load(entry + OUT)
    for i in range(0, chunks, WIDTH):
        at = i + tl.arange(0, WIDTH)
        number = tl.load(sure + first + at, mask=at < chunks, other=0, volatile=True)
        tl.store(out + first + at, to + tl.cumsum(number, 0) - number, mask=at < chunks)
        to += tl.sum(number, 0)
    return low


@triton.jit
def _learn(slack, bins, bar, key, found, count):
    """Set the slack such that thrice as many as wanted would have been candidates; ``key`` is the last winner's."""
    goal = 3 * count + 64
    counts = tl.load(bins + tl.arange(0, BINS))
    reached = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts >= goal
    cut = tl.sum(reached.to(tl.int32), 0) - 1
    edge, low = key.to(tl.float32, bitcast=True), bar.to(tl.float32, bitcast=True)
    more = (goal - count).to(tl.float32) / tl.maximum(found - count, 1).to(tl.float32)
    wider = edge - tl.maximum(edge - low, 0.002 * edge) * tl.minimum(more, 4.0)
    goal_at = tl.where(cut >= 0, (bar + (cut << FINE)).to(tl.float32, bitcast=True), wider)
    if (edge > 0) & (edge < float("inf")) & (tl.load(slack) > 0):
        tl.store(slack, tl.minimum(tl.maximum(goal_at / edge, 0.5), 0.9995))


@triton.jit
def _narrow(
    residual, segment, chunk, bar, entry, line, bins, learned, edge, row_base, row_count, keys, places,
    bound_keys, bound_places, sure, out,
    FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    found, count = tl.load(line + FOUND), tl.load(entry + COUNT)
    cut, above = _cut(bins, count)
    missed = (found < count) | (found > tl.load(entry + ROOM))
    # Bins count what found no room, too; they miss the last winner only far from the bar.
    unseen = missed & ((found < count) | (cut == BINS - 1)) & FIRST
    if not missed:
        _weigh(chunk, entry, line, bar, cut, row_base, row_count, keys, places, bound_keys, bound_places, sure)
    elif unseen:
        count_chunk(residual, chunk, entry, bins + BINS, BLOCK)
    tl.debug_barrier()
    if tl.atomic_add(line + MET, 1) == tl.load(entry + CHUNKS) - 1:
        tl.debug_barrier()
        if not missed:
            key = _decide(entry, line, edge + segment, bar, cut, above, bound_keys, bound_places, sure, out, BLOCK)
            if FIRST:
                _learn(learned + segment, bins, bar, key, found, count)
        elif unseen:
            tl.store(line + BAR, bar_for(bins + BINS, count).to(tl.int64))
            tl.store(learned + segment, tl.load(learned + segment) * 0.97)
        elif FIRST:
            tl.store(line + BAR, (bar + (cut << FINE)).to(tl.int64))
            _learn(learned + segment, bins, bar, bar + (cut << FINE), found, count)
        tl.debug_barrier()
        tl.store(line + MISSED, missed.to(tl.int64))
        tl.store(line + FOUND, 0)
        tl.store(line + BOUND, 0)
        tl.store(line + MET, 0)
        tl.store(bins + tl.arange(0, 2 * BINS), tl.zeros([2 * BINS], tl.int32))


@triton.jit
def narrow(
    residual, table, chunk_segment, hint, slack, learned, edge, state, hist, row_base, row_count, keys, places,
    bound_keys, bound_places, sure, out,
    FIRST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Work on all segments, or, if not FIRST, on those for which candidates were gathered anew."""
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, line = table + segment * COLUMNS, state + segment * COLUMNS
    bins = hist + segment * 2 * BINS
    if FIRST:
        _narrow(
            residual, segment, chunk, bar_of(hint, slack, segment), entry, line, bins, learned, edge, row_base,
            row_count, keys, places, bound_keys, bound_places, sure, out, True, BLOCK,
        )  # fmt: skip
    elif tl.load(line + MISSED) != 0:
        _narrow(
            residual, segment, chunk, tl.load(line + BAR).to(tl.int32), entry, line, bins, learned, edge, row_base,
            row_count, keys, places, bound_keys, bound_places, sure, out, False, BLOCK,
        )  # fmt: skip
