"""The one pass over all memory: update the target, and mark the candidates for selection.

A candidate is an entry whose key, the bits of its magnitude, lies in the segment's range. The pass only streams. It
leaves a word for every `SPAN` entries of a row: a bit for each four of them, set where there is a candidate, and above
the bits two numbers: of candidates, and of gradient entries that are not finite. Where many are selected, a second word
says how many entries lie above the range. `compact` reads the words, and of the entries only those marked.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.accumulate import enter, put, report
from gradwire.kernels.cuda.momentum import AVERAGE, averaged
from gradwire.kernels.cuda.places import place_of
from gradwire.kernels.cuda.topk.workspace import COLUMNS, COUNT, HIGH, LENGTH, LOW, SPAN, START

GROUP = tl.constexpr(4)  # entries behind one bit
COUNTED = tl.constexpr(16)  # where in a word the number of candidates starts,
BAD = tl.constexpr(24)  # and that of entries whose gradient is not finite
NEVER = tl.constexpr(0x7FFFFFFF)


@triton.jit
def key_of(x):
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _enter(
    grad, residual, momentum, denominator, new_residual, new_momentum, at, live, m, rest, decay,
    RULE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Write new memories at these places. Gives the target there, and where the gradient is not finite."""
    if RULE >= AVERAGE:
        v, u, bad = averaged(grad, residual, momentum, denominator, at, live, m, rest, decay, RULE, MASKED)
        put(new_momentum, at, u, live, MASKED)
        put(new_residual, at, v, live, MASKED)
        return v, bad
    else:
        return enter(grad, residual, momentum, new_residual, new_momentum, at, live, m, decay, RULE, True, MASKED)


@triton.jit
def _mark(hit, bad, row, words, BLOCK: tl.constexpr):
    """Write down a row's candidates, and how many entries are bad; both are [BLOCK / SPAN, SPAN]."""
    number = hit.to(tl.int32) + (bad.to(tl.int32) << (BAD - COUNTED))
    number = tl.sum(tl.reshape(number, [BLOCK // SPAN, SPAN // GROUP, GROUP]), 2)
    bit = tl.arange(0, SPAN // GROUP)[None, :]
    marks = tl.where(number & 0xFF != 0, 1 << bit, 0)
    word = tl.sum(marks + (number << COUNTED), 1)
    tl.store(words + row * (BLOCK // SPAN) + tl.arange(0, BLOCK // SPAN), word)


@triton.jit
def _line(row, base, row_segment, table, state, BLOCK: tl.constexpr):
    """All that a tile must know of a row: the range of keys, and where the segment starts and ends in the tile."""
    segment = tl.load(row_segment + row)
    entry, line = table + segment * COLUMNS, state + segment * COLUMNS
    wanted = tl.load(entry + COUNT) > 0
    low = tl.where(wanted, tl.load(line + LOW).to(tl.int32), NEVER)
    high = tl.where(wanted, tl.load(line + HIGH).to(tl.int32), NEVER)
    start = tl.load(entry + START) - base
    end = start + tl.load(entry + LENGTH)
    # As int32, which is kinder to registers.
    return low, high, tl.maximum(start, 0).to(tl.int32), tl.minimum(end, BLOCK).to(tl.int32)


@triton.jit
def _tile(
    grad, residual, momentum, denominator, new_residual, new_momentum, nonfinite, n, m, rest, decay, tile_row,
    row_segment, table, state, words, over,
    RULE: tl.constexpr, HOW: tl.constexpr, REPORT: tl.constexpr, DENSE: tl.constexpr, MASKED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    base = tile * BLOCK
    at = tl.arange(0, BLOCK // SPAN)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    row, stop = tl.load(tile_row + tile), tl.load(tile_row + tile + 1)
    # Ask for the row before waiting for the data: one wait instead of four.
    low, high, first, end = _line(row, base, row_segment, table, state, BLOCK)
    v, bad = _enter(
        place_of(grad, tile, base, HOW), residual + base, momentum + base, denominator + base, new_residual + base,
        new_momentum + base, at, at < n - base, m, rest, decay, RULE, MASKED,
    )  # fmt: skip
    if REPORT:
        report(bad, nonfinite)
    key = key_of(v)
    while row < stop:
        inside = (at >= first) & (at < end)
        hit = inside & (key >= low)
        if DENSE:
            sure = hit & (key >= high) & (high != NEVER)
            hit = hit & ~sure
            number = tl.sum(sure.to(tl.int32), 1)
            tl.store(over + row * (BLOCK // SPAN) + tl.arange(0, BLOCK // SPAN), number)
        _mark(hit, inside & bad, row, words, BLOCK)
        row += 1
        if row < stop:
            low, high, first, end = _line(row, base, row_segment, table, state, BLOCK)


@triton.jit
def mark(
    grad, residual, momentum, denominator, new_residual, new_momentum, nonfinite, n, m, rest, decay, tile_row,
    row_segment, table, state, words, over,
    RULE: tl.constexpr, HOW: tl.constexpr, REPORT: tl.constexpr, DENSE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """REPORT: some segment has no other program, so this one must report an entry that is not finite.

    HOW: how the gradient lies, see `places`.
    """
    if (tl.program_id(0).to(tl.int64) + 1) * BLOCK <= n:
        _tile(
            grad, residual, momentum, denominator, new_residual, new_momentum, nonfinite, n, m, rest, decay, tile_row,
            row_segment, table, state, words, over, RULE, HOW, REPORT, DENSE, False, BLOCK,
        )  # fmt: skip
    else:
        _tile(
            grad, residual, momentum, denominator, new_residual, new_momentum, nonfinite, n, m, rest, decay, tile_row,
            row_segment, table, state, words, over, RULE, HOW, REPORT, DENSE, True, BLOCK,
        )  # fmt: skip
