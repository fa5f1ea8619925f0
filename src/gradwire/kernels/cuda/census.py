"""Without a hint, or with one of no use: where the bar must be, and the candidates above it.

The bar comes from coarse bins of all magnitudes, or of a sample.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.collect import collect_chunk, first_row
from gradwire.kernels.cuda.plan import (
    BAR,
    BINS,
    CHUNK,
    CHUNKS,
    COLUMNS,
    COUNT,
    LENGTH,
    MET,
    ROW,
    ROWS,
    START,
)
from gradwire.kernels.cuda.sweep import key_of, lanes, mark, span

COARSE = tl.constexpr(20)  # bits of a key below its coarse bin: 8 bins for a factor of two
LOWEST = tl.constexpr(27 << 3)  # bin 0 is for all below 2^-100
RUN = tl.constexpr(64)  # of every tile, a sample has the first few


@triton.jit
def _bin(key):
    return tl.minimum(tl.maximum((key >> COARSE) - LOWEST, 0), BINS - 1)


@triton.jit
def _add(hist, counts):
    tl.atomic_add(hist + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def count_chunk(x, chunk, entry, hist, BLOCK: tl.constexpr):
    """Count all magnitudes of a chunk."""
    row, end = first_row(chunk, entry)
    tile = tl.load(entry + START) // BLOCK + row - tl.load(entry + ROW)
    at = tl.arange(0, BLOCK)
    counts = tl.zeros([BINS], tl.int32)
    for i in range((end - row).to(tl.int32)):
        first, stop = span((tile + i) * BLOCK, entry, BLOCK)
        inside = (at >= first) & (at < stop)
        key = key_of(tl.load(x + (tile + i) * BLOCK + at, mask=inside, other=0.0).to(tl.float32))
        counts += tl.histogram(_bin(key), BINS, mask=inside)
    _add(hist, counts)


@triton.jit
def bar_for(hist, wanted):
    """The lower end, as a key, of the bin at which ``wanted`` are reached from above; 1 below all bins."""
    counts = tl.load(hist + tl.arange(0, BINS)).to(tl.int64)
    reached = (tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts) >= wanted
    cut = tl.sum(reached.to(tl.int32), 0) - 1
    return tl.where(cut > 0, (cut + LOWEST) << COARSE, 1)


@triton.jit
def sampled(x, chunk, entry, BLOCK: tl.constexpr):
    """The keys of a chunk's sample, and which of them are there."""
    place = (chunk - tl.load(entry + CHUNK)) * ROWS * BLOCK
    place += tl.arange(0, ROWS)[:, None] * BLOCK + tl.arange(0, RUN)[None, :]
    place = tl.reshape(place, [ROWS * RUN])
    inside = place < tl.load(entry + LENGTH)
    return key_of(tl.load(x + tl.load(entry + START) + place, mask=inside, other=0.0).to(tl.float32)), inside


@triton.jit
def sample(x, edge, table, chunk_segment, state, coarse, BLOCK: tl.constexpr):
    """Write a bar for each segment, as a magnitude, into ``edge``."""
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, line = table + segment * COLUMNS, state + segment * COLUMNS
    bins = coarse + segment * BINS
    key, inside = sampled(x, chunk, entry, BLOCK)
    _add(bins, tl.histogram(_bin(key), BINS, mask=inside))
    tl.debug_barrier()
    if tl.atomic_add(line + MET, 1) == tl.load(entry + CHUNKS) - 1:
        tl.debug_barrier()
        taken = tl.sum(tl.load(bins + tl.arange(0, BINS)), 0).to(tl.float32)
        due = tl.load(entry + COUNT).to(tl.float32) * taken / tl.load(entry + LENGTH).to(tl.float32)
        # Half as many again, four standard deviations, and a few more where hardly any are due.
        bar = bar_for(bins, (1.5 * due + 4 * tl.sqrt(due) + 4).to(tl.int64))
        tl.store(edge + segment, bar.to(tl.float32, bitcast=True))
        tl.debug_barrier()
        tl.store(bins + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
        tl.store(line + MET, 0)


@triton.jit
def gather(x, chunk, entry, line, counter, words, base, count, keys, places, groups, BLOCK: tl.constexpr):
    """Mark a chunk's candidates for another bar, and put them aside."""
    row, end = first_row(chunk, entry)
    start, bar = tl.load(entry + START), tl.load(line + BAR).to(tl.int32)
    tile = start // BLOCK + row - tl.load(entry + ROW)
    at = lanes(BLOCK)
    for i in range((end - row).to(tl.int32)):
        first, stop = span((tile + i) * BLOCK, entry, BLOCK)
        inside = (at >= first) & (at < stop)
        key = key_of(tl.load(x + (tile + i) * BLOCK + at, mask=inside, other=0.0).to(tl.float32))
        mark(inside & (key >= bar), at < 0, row + i, words, BLOCK)
    tl.debug_barrier()
    collect_chunk(
        x, chunk, entry, bar, 0, counter, words, words, words, base, count, keys, places, groups, False, BLOCK
    )
