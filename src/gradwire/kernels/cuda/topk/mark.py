"""The one pass over all memory: update the target, and set candidates for selection aside.

A candidate is an entry whose key, the bits of its magnitude, lies in the segment's range. One warp works on a slab of
`SLAB` entries, so that no thread waits for another. It leaves a word for each row of the slab: how many candidates
there are and, above `COUNTED` bits, how many entries lie above the range where many are selected. Candidates go to the
slab's own slots, which no other program writes to; where there are more than slots, `compact` reads the slab again.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.accumulate import MOMENTUM, READ, put
from gradwire.kernels.cuda.momentum import fetched, target_from
from gradwire.kernels.cuda.places import place_of
from gradwire.kernels.cuda.topk.workspace import COLUMNS, COUNT, HIGH, LENGTH, LOW, PARTS, SLAB, START

COUNTED = tl.constexpr(16)  # bits of the number of candidates in a word
NEVER = tl.constexpr(0x7FFFFFFF)


@triton.jit
def key_of(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _line(segment, base, table, state):
    """All that a slab must know of a row: the range of keys, and where the segment starts and ends in the slab."""
    entry, line = table + segment * COLUMNS, state + segment * COLUMNS
    wanted = tl.load(entry + COUNT) > 0
    low = tl.where(wanted, tl.load(line + LOW).to(tl.int32), NEVER)
    high = tl.where(wanted, tl.load(line + HIGH).to(tl.int32), NEVER)
    start = tl.load(entry + START) - base
    end = start + tl.load(entry + LENGTH)
    # As int32, which is kinder to registers.
    first = tl.minimum(tl.maximum(start, 0), SLAB).to(tl.int32)
    return low, high, first, tl.minimum(tl.maximum(end, 0), SLAB).to(tl.int32)


@triton.jit
def _slab(
    grad, residual, momentum, denominator, new_residual, new_momentum, nonfinite, n, m, rest, decay, tile_row,
    tile_segment, row_segment, table, state, words, slot_bits, slot_at,
    RULE: tl.constexpr, HOW: tl.constexpr, DENSE: tl.constexpr, MASKED: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    slab = tl.program_id(0).to(tl.int64)
    tile, part, base = slab // PARTS, slab % PARTS, slab * SLAB
    at = tl.arange(0, SLAB)
    live = at < n - base
    row, stop, segment = tl.load(tile_row + tile), tl.load(tile_row + tile + 1), tl.load(tile_segment + tile)
    # All data is asked for before the segment is waited for, and what is known of that before the data is.
    g, v, u, d = fetched(
        place_of(grad, tile, tile * (SLAB * PARTS), HOW) + part * SLAB, residual + base, momentum + base,
        denominator + base, at, live, RULE, MASKED,
    )  # fmt: skip
    low, high, first, end = _line(segment, base, table, state)
    v, u, bad = target_from(g, v, u, d, m, rest, decay, RULE)
    if RULE != READ:
        if RULE >= MOMENTUM:
            put(new_momentum + base, at, u, live, MASKED)
        put(new_residual + base, at, v, live, MASKED)
        if tl.sum(bad.to(tl.int32), 0) > 0:
            tl.store(nonfinite, 1)
    bits = v.to(new_residual.dtype.element_ty).to(tl.float32).to(tl.int32, bitcast=True)
    key = bits & NEVER
    while row < stop:
        hit = (at >= first) & (at < end) & (key >= low)
        word = tl.zeros([], tl.int32)
        if DENSE:
            sure = hit & (key >= high) & (high != NEVER)
            hit = hit & ~sure
            word = tl.sum(sure.to(tl.int32), 0) << COUNTED
        one = hit.to(tl.int32)
        number = tl.sum(one, 0)
        to = row.to(tl.int64) * PARTS + part
        tl.store(words + to, word + number)
        if (number > 0) & (number <= SLOTS):
            slot = tl.cumsum(one, 0) - one
            tl.store(slot_bits + to * SLOTS + slot, bits, mask=hit)
            tl.store(slot_at + to * SLOTS + slot, at.to(tl.int16), mask=hit)
        row += 1
        if row < stop:
            low, high, first, end = _line(tl.load(row_segment + row), base, table, state)


@triton.jit
def mark(
    grad, residual, momentum, denominator, new_residual, new_momentum, nonfinite, n, m, rest, decay, tile_row,
    tile_segment, row_segment, table, state, words, slot_bits, slot_at,
    RULE: tl.constexpr, HOW: tl.constexpr, DENSE: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """HOW: how the gradient lies, see `places`."""
    if (tl.program_id(0).to(tl.int64) + 1) * SLAB <= n:
        _slab(
            grad, residual, momentum, denominator, new_residual, new_momentum, nonfinite, n, m, rest, decay, tile_row,
            tile_segment, row_segment, table, state, words, slot_bits, slot_at, RULE, HOW, DENSE, False, SLOTS,
        )  # fmt: skip
    else:
        _slab(
            grad, residual, momentum, denominator, new_residual, new_momentum, nonfinite, n, m, rest, decay, tile_row,
            tile_segment, row_segment, table, state, words, slot_bits, slot_at, RULE, HOW, DENSE, True, SLOTS,
        )  # fmt: skip
