"""The one pass over memory: update the target, and mark the candidates for selection.

A candidate is an entry whose magnitude reaches a bar: a little less than the last winner's of the step before. The pass
only streams. It leaves a word for every `SPAN` entries of a row: a bit for each four of them, set where there is a
candidate, and above the bits two numbers: of candidates, and of gradient entries that are not finite. `collect` reads
the words, and of the entries only those marked.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.enter import enter, report
from gradwire.kernels.cuda.plan import COLUMNS, COUNT, LENGTH, SPAN, START

GROUP = tl.constexpr(4)  # entries behind one bit
COUNTED = tl.constexpr(16)  # where in a word the number of candidates starts,
BAD = tl.constexpr(24)  # and that of entries whose gradient is not finite
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
def span(base, entry, BLOCK: tl.constexpr):
    """Where the segment starts and ends in the tile that starts at ``base``, as int32, which is kinder to registers."""
    start = tl.load(entry + START) - base
    end = start + tl.load(entry + LENGTH)
    return tl.maximum(start, 0).to(tl.int32), tl.minimum(end, BLOCK).to(tl.int32)


@triton.jit
def lanes(BLOCK: tl.constexpr):
    """The places of a tile, those of a word to a row: [BLOCK / SPAN, SPAN]."""
    return tl.arange(0, BLOCK // SPAN)[:, None] * SPAN + tl.arange(0, SPAN)[None, :]


@triton.jit
def mark(hit, bad, row, words, BLOCK: tl.constexpr):
    """Write down a row's candidates, and how many entries are bad. Both are laid out as `lanes` is."""
    number = hit.to(tl.int32) + (bad.to(tl.int32) << (BAD - COUNTED))
    number = tl.sum(tl.reshape(number, [BLOCK // SPAN, SPAN // GROUP, GROUP]), 2)
    bit = tl.arange(0, SPAN // GROUP)[None, :]
    marks = tl.where(number & 0xFF != 0, 1 << bit, 0)
    word = tl.sum(marks + (number << COUNTED), 1)
    tl.store(words + row * (BLOCK // SPAN) + tl.arange(0, BLOCK // SPAN), word)


@triton.jit
def _line(row, base, row_segment, table, edge, slack, BLOCK: tl.constexpr):
    """All that a tile must know of a row."""
    segment = tl.load(row_segment + row)
    entry = table + segment * COLUMNS
    bar = tl.where(tl.load(entry + COUNT) > 0, bar_of(edge, slack, segment), NEVER)
    first, end = span(base, entry, BLOCK)
    return bar, first, end


@triton.jit
def _tile(
    grad, residual, momentum, new_residual, new_momentum, edge, broken, n, m, decay, tile_row, row_segment, table,
    slack, words,
    RULE: tl.constexpr, TELL: tl.constexpr, MASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0).to(tl.int64)
    base = tile * BLOCK
    at = lanes(BLOCK)
    row, stop = tl.load(tile_row + tile), tl.load(tile_row + tile + 1)
    # Ask for the row before waiting for the data: one wait instead of four.
    bar, first, end = _line(row, base, row_segment, table, edge, slack, BLOCK)
    v, bad = enter(
        grad + base, residual + base, momentum + base, new_residual + base, new_momentum + base,
        at, at < n - base, m, decay, RULE, True, MASKED,
    )  # fmt: skip
    if TELL:
        report(bad, broken)
    key = key_of(v)
    while row < stop:
        inside = (at >= first) & (at < end)
        mark(inside & (key >= bar), inside & bad, row, words, BLOCK)
        row += 1
        if row < stop:
            bar, first, end = _line(row, base, row_segment, table, edge, slack, BLOCK)


@triton.jit
def sweep(
    grad, residual, momentum, new_residual, new_momentum, edge, broken, n, m, decay, tile_row, row_segment, table,
    slack, words,
    RULE: tl.constexpr, TELL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """TELL: some segment is collected by nobody, so that the sweep itself must say when an entry is bad."""
    if (tl.program_id(0).to(tl.int64) + 1) * BLOCK <= n:
        _tile(
            grad, residual, momentum, new_residual, new_momentum, edge, broken, n, m, decay, tile_row, row_segment,
            table, slack, words, RULE, TELL, False, BLOCK,
        )  # fmt: skip
    else:
        _tile(
            grad, residual, momentum, new_residual, new_momentum, edge, broken, n, m, decay, tile_row, row_segment,
            table, slack, words, RULE, TELL, True, BLOCK,
        )  # fmt: skip
