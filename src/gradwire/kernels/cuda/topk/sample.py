"""Before the pass over memory: a sample of the target says in which range of keys the last winner lies.

Nothing is remembered from step to step, so that what a gradient was before does not matter: it may be the same again,
or a thousand times as large. Programs count a sample's magnitudes in coarse bins; the last program of a segment sets
its range. Where few are selected, `refine` counts the coarse bin at the lower end of the range once more, in fine bins:
error feedback leaves very many entries just below the last winner, and hardly any above it. Where many are selected,
keys are taken to be spread evenly inside a bin. A wrong range costs time, and never changes the result.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.momentum import averaged
from gradwire.kernels.cuda.places import origin_of
from gradwire.kernels.cuda.topk.mark import NEVER, key_of
from gradwire.kernels.cuda.topk.workspace import (
    ARRIVED,
    BINS,
    BITS,
    CHUNK,
    CHUNKS,
    COLUMNS,
    COUNT,
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
    SPARSE,
    START,
)

_SHIFT = tl.constexpr(20)  # bits of a key below its coarse bin: 8 bins for a factor of two
_WIDTH = tl.constexpr(1 << _SHIFT.value)  # keys of a bin
_LOWEST = tl.constexpr(27 << 3)  # bin 0 is for all below 2^-100
_FINE = tl.constexpr(_SHIFT.value - 10)  # bits of a key below its fine bin: as many fine bins as there are bins
_RUN = tl.constexpr(64)  # neighbors that are sampled together
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
def _key_at(counts, reached, rank):
    """The key that about ``rank`` of the sample reach; 1 below all bins."""
    bin = tl.sum((reached >= rank).to(tl.int32), 0) - 1
    here = tl.arange(0, BINS) == bin
    inside = tl.sum(tl.where(here, counts, 0), 0).to(tl.float32)
    above = tl.sum(tl.where(here, reached, 0), 0).to(tl.float32) - inside
    part = tl.minimum((rank - above) / tl.maximum(inside, 1.0), 1.0)
    part = tl.where(bin == BINS - 1, 1.0, part)  # the highest bin has no upper end
    key = ((bin + 1 + _LOWEST) << _SHIFT) - (part * _WIDTH).to(tl.int32)
    return tl.where(bin > 0, key, 1)


@triton.jit
def _set_range(entry, line, bins):
    counts = tl.load(bins + tl.arange(0, BINS))
    taken = tl.sum(counts, 0)
    reached = taken - tl.cumsum(counts, 0) + counts
    taken = taken.to(tl.float32)
    share = tl.load(entry + COUNT).to(tl.float32) / tl.load(entry + LENGTH).to(tl.float32)
    due = share * taken
    if tl.load(entry + KIND) == DENSE:
        doubt = 4 * tl.sqrt(due * (1 - share)) + taken / 256 + 4  # four standard deviations, and uneven bins
        low = _key_at(counts, reached, due + doubt)
        high = tl.maximum(_key_at(counts, reached, due - doubt), low + 1)
        bits = ((high - low).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 126 - 7  # 128 bins or fewer
    else:
        # Half as many again, four standard deviations, and a few more where hardly any are due.
        rank = 1.5 * due + 4 * tl.sqrt(due) + 4
        bin = tl.sum((reached >= rank).to(tl.int32), 0) - 1
        inside = tl.arange(0, BINS) == bin
        above = tl.sum(tl.where(inside, reached - counts, 0), 0).to(tl.float32)
        low = tl.where(bin > 0, (bin + _LOWEST) << _SHIFT, 1)
        high = low * 0 + NEVER
        bits = tl.where(low > 1, low * 0 + _SPARSE_BITS, _ALL_BITS)
        tl.store(line + KEY, low.to(tl.int64))  # for `refine`: where the bin begins, and how many of it are wanted
        tl.store(line + LAST, (rank - above).to(tl.int64))
    tl.store(line + LOW, low.to(tl.int64))
    tl.store(line + HIGH, high.to(tl.int64))
    tl.store(line + BITS, tl.maximum(bits, 0).to(tl.int64))
    tl.debug_barrier()
    tl.store(bins + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))


@triton.jit
def _sampled(
    grad, residual, momentum, denominator, entry, mine, chunks, m, rest, decay,
    RULE: tl.constexpr, HOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The keys of a chunk's sample."""
    run = mine * ROWS + tl.arange(0, ROWS)
    at = tl.load(entry + START) + run[:, None] * (tl.load(entry + LENGTH) // (chunks * ROWS))
    at = tl.reshape(at + tl.arange(0, _RUN)[None, :], [ROWS * _RUN])
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
    RULE: tl.constexpr, HOW: tl.constexpr, BLOCK: tl.constexpr,
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
            grad, residual, momentum, denominator, entry, mine, chunks, m, rest, decay, RULE, HOW, BLOCK
        )  # fmt: skip
        _count(bins, tl.minimum(tl.maximum((key >> _SHIFT) - _LOWEST, 0), BINS - 1), key >= 0)
        if is_last(line, _sampled_of(chunks)):
            _set_range(entry, line, bins)


@triton.jit
def refine(
    grad, residual, momentum, denominator, sampled, table, chunk_segment, state, coarse, m, rest, decay,
    RULE: tl.constexpr, HOW: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Count the bin at the lower end of the range in fine bins, where few are selected."""
    chunk = tl.load(sampled + tl.program_id(0))
    segment = tl.load(chunk_segment + chunk)
    entry, line, bins = table + segment * COLUMNS, state + segment * COLUMNS, coarse + segment * BINS
    mine, chunks = chunk - tl.load(entry + CHUNK), tl.load(entry + CHUNKS)
    begin = tl.load(line + KEY).to(tl.int32)
    if (tl.load(entry + KIND) == SPARSE) & (tl.load(line + BITS) == _SPARSE_BITS):
        key = _sampled(
            grad, residual, momentum, denominator, entry, mine, chunks, m, rest, decay, RULE, HOW, BLOCK
        )  # fmt: skip
        fine = tl.minimum(tl.maximum((key - begin) >> _FINE, 0), BINS - 1)
        _count(bins, fine, (key >= begin) & (key - begin < _WIDTH))
        if is_last(line, _sampled_of(chunks)):
            counts = tl.load(bins + tl.arange(0, BINS), volatile=True)
            reached = tl.sum(counts, 0) - tl.cumsum(counts, 0) + counts
            lowest = tl.sum((reached >= tl.load(line + LAST)).to(tl.int32), 0) - 1
            tl.store(line + LOW, (begin + (tl.maximum(lowest, 0) << _FINE)).to(tl.int64))
            tl.debug_barrier()
            tl.store(bins + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
