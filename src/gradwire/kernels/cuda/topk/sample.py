"""Before the pass over memory: a sample of the target says in which range of keys the last winner lies.

Nothing is remembered from step to step, so that what a gradient was before does not matter: it may be the same again,
or a thousand times as large. Programs count a sample's magnitudes in coarse bins; the last program of a segment sets
its range. Then `refine` counts the coarse bins in which the range begins and ends once more, in fine bins: error
feedback leaves very many entries just below the last winner, and hardly any above it. A wrong range costs time, and
never changes the result.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.momentum import averaged
from gradwire.kernels.cuda.places import origin_of
from gradwire.kernels.cuda.topk.mark import NEVER, key_of
from gradwire.kernels.cuda.topk.workspace import (
    ABOVE,
    ARRIVED,
    BINS,
    BITS,
    CHUNK,
    CHUNKS,
    COLUMNS,
    COUNT,
    CUT,
    DENSE,
    HIGH,
    KEY,
    KIND,
    LAST,
    LENGTH,
    LOW,
    ROWS,
    SAMPLED,
    SMALL,
    START,
)

_SHIFT = tl.constexpr(20)  # bits of a key below its coarse bin: 8 bins for a factor of two
_LOWEST = tl.constexpr(27 << 3)  # bin 0 is for all below 2^-100
_FINE = tl.constexpr(_SHIFT.value - 10)  # bits of a key below its fine bin, where one coarse bin is cut into all
_SPARSE_BITS = tl.constexpr(17)  # of a candidate's key below its bin: 64 bins for a factor of two
_ALL_BITS = tl.constexpr(24)  # bins for all there is


@triton.jit
def is_last(line, programs):
    """Whether all other programs of the segment are done."""
    tl.debug_barrier()
    last = tl.atomic_add(line + ARRIVED, 1) == programs - 1
    tl.debug_barrier()
    if last:
        tl.store(line + ARRIVED, 0)
    return last


@triton.jit
def _reached(bins):
    """How many of the sample a bin has, and how many it has with all above it; the bins are cleared."""
    place = tl.arange(0, BINS)
    counts = tl.load(bins + place, volatile=True)
    tl.debug_barrier()
    tl.store(bins + place, tl.zeros([BINS], tl.int32))
    return counts, tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts


@triton.jit
def _bin_of(reached, rank):
    """The bin in which so many are reached; -1: there are fewer."""
    return tl.sum((reached >= rank).to(tl.int32), 0) - 1


@triton.jit
def _bits_of(low, high):
    """Bits of a key below its bin, of 128 bins or fewer for all keys between."""
    return tl.maximum(((high - low).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126 - 7, 0)


@triton.jit
def _set_range(entry, line, bins):
    """Set a range that ends with coarse bins; and, for `refine`, where these begin and which ranks are wanted."""
    counts, reached = _reached(bins)
    taken = tl.max(reached, 0).to(tl.float32)
    share = tl.load(entry + COUNT).to(tl.float32) / tl.load(entry + LENGTH).to(tl.float32)
    due = share * taken
    dense = tl.load(entry + KIND) == DENSE
    # Four standard deviations; half as many again and a few more, or, of many, some for neighbors that are alike.
    more = tl.where(dense, 4 * tl.sqrt(due * (1 - share)) + taken / 256 + 4, 0.5 * due + 4 * tl.sqrt(due) + 4)
    bin = _bin_of(reached, due + more)
    top = tl.where(dense, _bin_of(reached, tl.maximum(due - more, 1)), bin)
    ended = dense & (top < BINS - 1)  # the highest bin has no upper end
    low = tl.where(bin > 0, (bin + _LOWEST) << _SHIFT, 1)
    high = tl.where(ended, (top + 1 + _LOWEST) << _SHIFT, NEVER)
    sparse_bits = tl.where(bin > 0, low * 0 + _SPARSE_BITS, _ALL_BITS)
    above = tl.sum(tl.where(tl.arange(0, BINS) == top, reached - counts, 0), 0).to(tl.float32)
    octaves = (2 * (top - bin) + 1).to(tl.float32).to(tl.int32, bitcast=True) >> 23  # of a power of two bins or more
    tl.store(line + LOW, low.to(tl.int64))
    tl.store(line + HIGH, high.to(tl.int64))
    tl.store(line + BITS, tl.where(dense, _bits_of(low, high), sparse_bits).to(tl.int64))
    tl.store(line + KEY, tl.where((bin > 0) & (ended | ~dense), low, 0).to(tl.int64))
    tl.store(line + CUT, (octaves - 127 + _FINE).to(tl.int64))
    tl.store(line + LAST, (due + more - above).to(tl.int64))
    tl.store(line + ABOVE, tl.maximum(due - more - above, 1).to(tl.int64))


@triton.jit
def _sampled(
    grad, residual, momentum, denominator, entry, mine, chunks, m, rest, decay,
    RULE: tl.constexpr, HOW: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The keys of a chunk's sample: so many runs of RUN neighbors as it has rows."""
    run = mine * ROWS + tl.arange(0, ROWS)
    at = tl.load(entry + START) + run[:, None] * (tl.load(entry + LENGTH) // (chunks * ROWS))
    at = tl.reshape(at + tl.arange(0, RUN)[None, :], [ROWS * RUN])
    grad = origin_of(grad, at, HOW, BLOCK)
    v, _, _ = averaged(grad, residual, momentum, denominator, at, at >= 0, m, rest, decay, RULE, False)
    return key_of(v)


@triton.jit
def _sampled_of(chunks):
    """How many chunks of a segment are sampled."""
    every = chunks // SAMPLED + 1
    return (chunks + every - 1) // every


@triton.jit
def _count(bins, bin, live):
    counts = tl.histogram(bin, BINS, mask=live)
    tl.atomic_add(bins + tl.arange(0, BINS), counts, mask=counts > 0, sem="relaxed")


@triton.jit
def sample(
    grad, residual, momentum, denominator, sampled, table, chunk_segment, state, coarse, m, rest, decay,
    RULE: tl.constexpr, HOW: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.load(sampled + tl.program_id(0))
    segment = tl.load(chunk_segment + chunk)
    entry, line, bins = table + segment * COLUMNS, state + segment * COLUMNS, coarse + segment * BINS
    mine, chunks = chunk - tl.load(entry + CHUNK), tl.load(entry + CHUNKS)
    if tl.load(entry + KIND) == SMALL:
        tl.store(line + LOW, 0)
        tl.store(line + HIGH, NEVER)
        tl.store(line + BITS, _ALL_BITS)
    else:
        key = _sampled(
            grad, residual, momentum, denominator, entry, mine, chunks, m, rest, decay, RULE, HOW, RUN, BLOCK
        )  # fmt: skip
        _count(bins, tl.minimum(tl.maximum((key >> _SHIFT) - _LOWEST, 0), BINS - 1), key >= 0)
        if is_last(line, _sampled_of(chunks)):
            _set_range(entry, line, bins)


@triton.jit
def refine(
    grad, residual, momentum, denominator, sampled, table, chunk_segment, state, coarse, m, rest, decay,
    RULE: tl.constexpr, HOW: tl.constexpr, RUN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the coarse bins at the ends of the range in fine bins, and set the range once more."""
    chunk = tl.load(sampled + tl.program_id(0))
    segment = tl.load(chunk_segment + chunk)
    entry, line, bins = table + segment * COLUMNS, state + segment * COLUMNS, coarse + segment * BINS
    mine, chunks = chunk - tl.load(entry + CHUNK), tl.load(entry + CHUNKS)
    begin, bits, kind = tl.load(line + KEY).to(tl.int32), tl.load(line + CUT).to(tl.int32), tl.load(entry + KIND)
    end = tl.load(line + HIGH).to(tl.int32)  # what lies above was counted in coarse bins
    if (kind != SMALL) & (begin > 0):
        key = _sampled(
            grad, residual, momentum, denominator, entry, mine, chunks, m, rest, decay, RULE, HOW, RUN, BLOCK
        )  # fmt: skip
        fine = (key - begin) >> bits
        _count(bins, tl.minimum(tl.maximum(fine, 0), BINS - 1), (key >= begin) & (key < end) & (fine < BINS))
        if is_last(line, _sampled_of(chunks)):
            _, reached = _reached(bins)
            lowest = tl.maximum(_bin_of(reached, tl.load(line + LAST)), 0)
            low = begin + (lowest << bits)
            tl.store(line + LOW, low.to(tl.int64))
            if kind == DENSE:
                highest = tl.maximum(_bin_of(reached, tl.load(line + ABOVE)), lowest)
                high = begin + ((highest + 1) << bits)
                tl.store(line + HIGH, high.to(tl.int64))
                tl.store(line + BITS, _bits_of(low, high).to(tl.int64))
