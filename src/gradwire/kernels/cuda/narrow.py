"""After the sweep: find each segment's last winner, and where each chunk's winners go.

Most candidates lie in bins that win or lose as a whole; programs count those, and put the rest aside once more. The
program that arrives last in a segment searches that rest. Where all that is not zero is too little, zeros win, too.
Where there were too few candidates otherwise, or too many, it finds a better bar, for another try, or leaves all to
`radix`.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.census import bar_for, count_chunk
from gradwire.kernels.cuda.collect import count_from_above, fine_bin, fine_bits, first_row
from gradwire.kernels.cuda.plan import (
    ABOVE,
    APART,
    BAR,
    BINS,
    BOUND,
    CHUNK,
    CHUNKS,
    COLUMNS,
    COUNT,
    CUT,
    FOUND,
    KEY,
    LAST,
    LENGTH,
    MET,
    MISSED,
    OUT,
    ROOM,
    ROW,
    ROWS,
    SLOT,
    START,
    WITHIN,
    ZEROS,
)
from gradwire.kernels.cuda.radix import share_out
from gradwire.kernels.cuda.search import TOP, WIDTH, search, wins
from gradwire.kernels.cuda.sweep import bar_of

WIDE = tl.constexpr(512)  # candidates of a chunk that are looked at together
_CROWD = tl.constexpr(16384)  # candidates that one program may search,
_SHARE = tl.constexpr(512)  # and one more for so many entries


@triton.jit
def _weigh(chunk, entry, line, bar, bits, cut, base, count, keys, places, bound_keys, bound_places, sure):
    """Count a chunk's sure winners; put those in the cut bin aside."""
    slot, number = tl.load(entry + SLOT), tl.load(count + chunk)
    keys += slot + tl.load(base + chunk)
    places += slot + tl.load(base + chunk)
    winners = tl.zeros([WIDE], tl.int32)
    for j in range(0, number, WIDE):
        at = j + tl.arange(0, WIDE)
        live = at < number
        key = tl.load(keys + at, mask=live, other=0)
        bin = fine_bin(key, bar, bits)
        winners += (live & (bin > cut)).to(tl.int32)
        unsure = live & (bin == cut)
        several = tl.sum(unsure.to(tl.int32), 0)
        if several > 0:
            to = tl.atomic_add(line + BOUND, several.to(tl.int64), sem="relaxed") + slot
            to += tl.cumsum(unsure.to(tl.int32), 0) - 1
            tl.store(bound_keys + to, key, mask=unsure)
            tl.store(bound_places + to, tl.load(places + at, mask=unsure), mask=unsure)
    tl.store(sure + chunk, tl.sum(winners, 0))


@triton.jit
def _decide(entry, line, edge, bar, bits, cut, above, keys, places, sure, out, BLOCK: tl.constexpr):
    """Search the cut bin, and add its winners to their chunks'; then sum up. Returns the last winner's key."""
    start, length, count = tl.load(entry + START), tl.load(entry + LENGTH), tl.load(line + BOUND).to(tl.int32)
    keys += tl.load(entry + SLOT)
    places += tl.load(entry + SLOT)
    low = bar + (cut << bits)
    high = tl.where(cut == BINS - 1, TOP, bar + (tl.minimum(cut + 1, BINS - 1) << bits) - 1)
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
def _learn(slack, fine, bar, bits, key, found, wanted):
    """Set the slack such that two and a half times as many as wanted would have come; ``key`` is the last winner's."""
    goal = 5 * wanted // 2 + 64
    _, reached = count_from_above(fine)
    cut = tl.sum((reached >= goal).to(tl.int32), 0) - 1
    edge, low = key.to(tl.float32, bitcast=True), bar.to(tl.float32, bitcast=True)
    more = (goal - wanted).to(tl.float32) / tl.maximum(found - wanted, 1).to(tl.float32)
    wider = edge - tl.maximum(edge - low, 0.002 * edge) * tl.minimum(more, 4.0)
    goal_at = tl.where(cut >= 0, (bar + (cut << bits)).to(tl.float32, bitcast=True), wider)
    if (edge > 0) & (edge < float("inf")) & (tl.load(slack) > 0):
        tl.store(slack, tl.minimum(tl.maximum(goal_at / edge, 0.5), 0.9995))


@triton.jit
def _count_zeros(chunk, entry, count, sure, BLOCK: tl.constexpr):
    """How many zeros a chunk has: whatever is no candidate is one."""
    row, end = first_row(chunk, entry)
    begin = (row - tl.load(entry + ROW)) * BLOCK - tl.load(entry + START) % BLOCK  # it may begin before the segment
    size = tl.minimum(begin + (end - row) * BLOCK, tl.load(entry + LENGTH)) - tl.maximum(begin, 0)
    tl.store(sure + chunk, size.to(tl.int32) - tl.load(count + chunk))


@triton.jit
def _admit_zeros(entry, line, edge, found, count, sure, out):
    """All candidates win, and the first zeros with them."""
    first, chunks = tl.load(entry + CHUNK), tl.load(entry + CHUNKS).to(tl.int32)
    share_out(count + first, sure + first, out + first, chunks, tl.load(entry + OUT), tl.load(entry + COUNT) - found)
    tl.store(line + KEY, tl.zeros([], tl.int64))
    tl.store(edge, 0.0)


@triton.jit
def narrow(
    residual, hint, edge, table, chunk_segment, slack, learned, state, fine, coarse, base, count, keys, places,
    bound_keys, bound_places, sure, out,
    DIGITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """DIGITS: where this fails, `radix` comes next, and needs no bar."""
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, line = table + segment * COLUMNS, state + segment * COLUMNS
    fine += segment * BINS * APART
    coarse += segment * BINS
    bar = bar_of(hint, slack, segment)
    bits = fine_bits(hint, bar, segment)
    found, wanted = tl.load(line + FOUND), tl.load(entry + COUNT)
    cut, above = tl.load(line + CUT).to(tl.int32), tl.load(line + ABOVE)
    zeros = (found < wanted) & (bar == 1)
    missed = ((found < wanted) & (bar > 1)) | (found > tl.load(entry + ROOM))
    if DIGITS:  # one program would search the cut bin for longer than all read everything
        missed = missed | ((found >= wanted) & (tl.load(line + WITHIN) > tl.load(entry + LENGTH) // _SHARE + _CROWD))
    # Bins count what found no room, too; they miss the last winner only far from the bar.
    unseen = missed & ((found < wanted) | (cut == BINS - 1))
    if zeros:
        _count_zeros(chunk, entry, count, sure, BLOCK)
    elif not missed:
        _weigh(chunk, entry, line, bar, bits, cut, base, count, keys, places, bound_keys, bound_places, sure)
    elif unseen & (not DIGITS):
        count_chunk(residual, chunk, entry, coarse, BLOCK)
    tl.debug_barrier()
    if tl.atomic_add(line + MET, 1) == tl.load(entry + CHUNKS) - 1:
        tl.debug_barrier()
        if zeros:
            _admit_zeros(entry, line, edge + segment, found, count, sure, out)
        elif not missed:
            key = _decide(
                entry, line, edge + segment, bar, bits, cut, above, bound_keys, bound_places, sure, out, BLOCK
            )
            _learn(learned + segment, fine, bar, bits, key, found, wanted)
        elif unseen:
            if not DIGITS:
                tl.store(line + BAR, bar_for(coarse, wanted).to(tl.int64))
            tl.store(learned + segment, tl.maximum(tl.load(learned + segment) * 0.97, 0.5))
        else:
            tl.store(line + BAR, (bar + (cut << bits)).to(tl.int64))
            _learn(learned + segment, fine, bar, bits, bar + (cut << bits), found, wanted)
        tl.debug_barrier()
        tl.store(line + MISSED, tl.where(zeros, ZEROS, missed.to(tl.int64)))
        tl.store(line + FOUND, 0)
        tl.store(line + BOUND, 0)
        tl.store(line + MET, 0)
        tl.store(fine + tl.arange(0, BINS) * APART, tl.zeros([BINS], tl.int32))
        if not DIGITS:
            tl.store(coarse + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
