"""The one pass over memory: update the target, and put aside the candidates for selection.

A candidate is an entry whose magnitude reaches a bar: a little less than the last winner's of the step before. Its key,
the magnitude's bits, goes with its place into the segment's room, rows in any order, but each row's together and
rising. Fine bins above the bar are counted on the way.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.enter import enter
from gradwire.kernels.cuda.plan import BINS, COLUMNS, COUNT, FOUND, LENGTH, ROOM, SLOT, START

FINE = tl.constexpr(14)  # bits of a key below its fine bin: 512 bins for a factor of two
NEVER = tl.constexpr(0x7FFFFFFF)


@triton.jit
def key_of(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def bar_of(edge, slack, segment):
    """The key that candidates must reach. Zeros are none, unless all are: they would not fit."""
    part = tl.load(slack + segment)
    bar = key_of(tl.minimum(tl.load(edge + segment), 3e38) * part)
    return tl.where(part > 0, tl.maximum(bar, 1), 0)


@triton.jit
def fine_bin(key, bar):
    return tl.minimum((key - bar) >> FINE, BINS - 1)


@triton.jit
def span(base, entry, BLOCK: tl.constexpr):
    """Where the segment starts and ends in the tile that starts at ``base``, as int32, which is kinder to registers."""
    start = tl.load(entry + START) - base
    end = start + tl.load(entry + LENGTH)
    return tl.maximum(start, 0).to(tl.int32), tl.minimum(end, BLOCK).to(tl.int32)


@triton.jit
def lanes(BLOCK: tl.constexpr):
    """The places of a tile, eight to a row: [BLOCK / 8, 8]."""
    return tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]


@triton.jit
def put_aside(
    x, hit, place, row, slot, room, counter, bar, hist, row_base, row_count, keys, places,
    HIST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Keep a row's candidates in the ``room`` from ``slot``. The tile, which lies at ``x``, starts at ``place``.

    Hits are few. So each eight entries become one word first, and only words are looked at, a bit at a time; what a bit
    stands for is read back.
    """
    word = tl.sum(hit.to(tl.int32) << tl.arange(0, 8)[None, :], 1)
    count = tl.sum(hit.to(tl.int32), 1)
    number = tl.sum(count, 0)
    base = tl.full([], 0, tl.int64)
    if number > 0:
        base = tl.atomic_add(counter, number.to(tl.int64), sem="relaxed")
        rank = tl.cumsum(count, 0) - count
        keys += slot + base
        places += slot + base
        left = tl.maximum(room - base, 0).to(tl.int32)
        tl.debug_barrier()  # other threads of the program have stored what is read here
        for _ in range(tl.max(count, 0)):
            some = word != 0
            lowest = word & -word
            bit = (lowest.to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127
            at = tl.arange(0, BLOCK // 8) * 8 + tl.where(some, bit, 0)
            key = key_of(tl.load(x + at, mask=some, other=0.0).to(tl.float32))
            kept = some & (rank < left)
            tl.store(keys + rank, key, mask=kept)
            tl.store(places + rank, place.to(places.dtype.element_ty) + at, mask=kept)
            if HIST:
                tl.atomic_add(hist + fine_bin(tl.where(some, key, bar), bar), 1, mask=some, sem="relaxed")
            word = word ^ lowest
            rank += 1
    tl.store(row_base + row, base)
    tl.store(row_count + row, number)


@triton.jit
def _line(row, base, row_segment, table, edge, slack, BLOCK: tl.constexpr):
    """All that a tile must know of a row."""
    segment = tl.load(row_segment + row)
    entry = table + segment * COLUMNS
    bar = tl.where(tl.load(entry + COUNT) > 0, bar_of(edge, slack, segment), NEVER)
    first, end = span(base, entry, BLOCK)
    return segment, bar, first, end, base - tl.load(entry + START), tl.load(entry + SLOT), tl.load(entry + ROOM)


@triton.jit
def _tile(
    grad, residual, momentum, broken, n, m, decay, tile_row, row_segment, table, edge, slack, state, hist,
    row_base, row_count, keys, places,
    RULE: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    base = tile * BLOCK
    at = lanes(BLOCK)
    row, stop = tl.load(tile_row + tile), tl.load(tile_row + tile + 1)
    # Ask for the row before waiting for the data: one wait instead of four.
    segment, bar, first, end, place, slot, room = _line(row, base, row_segment, table, edge, slack, BLOCK)
    v = enter(grad + base, residual + base, momentum + base, broken, at, at < n - base, m, decay, RULE, True, MASKED)
    key = key_of(v)
    while row < stop:
        hit = (at >= first) & (at < end) & (key >= bar)
        counter, bins = state + segment * COLUMNS + FOUND, hist + segment * 2 * BINS
        put_aside(
            residual + base, hit, place, row, slot, room, counter, bar, bins, row_base, row_count, keys, places,
            True, BLOCK,
        )  # fmt: skip
        row += 1
        if row < stop:
            segment, bar, first, end, place, slot, room = _line(row, base, row_segment, table, edge, slack, BLOCK)


@triton.jit
def sweep(
    grad, residual, momentum, broken, n, m, decay, tile_row, row_segment, table, edge, slack, state, hist,
    row_base, row_count, keys, places,
    RULE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if (tl.program_id(0).to(tl.int64) + 1) * BLOCK <= n:
        _tile(
            grad, residual, momentum, broken, n, m, decay, tile_row, row_segment, table, edge, slack, state, hist,
            row_base, row_count, keys, places, RULE, False, BLOCK,
        )  # fmt: skip
    else:
        _tile(
            grad, residual, momentum, broken, n, m, decay, tile_row, row_segment, table, edge, slack, state, hist,
            row_base, row_count, keys, places, RULE, True, BLOCK,
        )  # fmt: skip
