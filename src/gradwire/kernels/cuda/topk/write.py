"""The last launch of a selection: write the winners in the order of their places, and take them off the memories.

Where few are selected, winners are among the candidates put aside; otherwise the chunk is read as it lies. SUBTRACT: 1
takes winners off the residual, 2 also masks the momentum.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.topk.binary_search import wins
from gradwire.kernels.cuda.topk.mark import NEVER, key_of
from gradwire.kernels.cuda.topk.radix_fallback import stretch, tile_of
from gradwire.kernels.cuda.topk.threshold import WIDE
from gradwire.kernels.cuda.topk.workspace import (
    COLUMNS,
    DENSE,
    EXACT,
    KEY,
    KIND,
    LAST,
    LENGTH,
    OUTCOME,
    SLOT,
    START,
    ZEROS,
)

_TILE = tl.constexpr(1024)  # entries that are looked at together


@triton.jit
def _store(x, momentum, at, value, to, won, indices, values, VALUES: tl.constexpr, SUBTRACT: tl.constexpr):
    tl.store(indices + to, at, mask=won)
    if VALUES:
        tl.store(values + to, value, mask=won)
    if SUBTRACT > 0:  # what is sent as it is leaves nothing, unless it was infinite
        tl.store(x + at, value - value, mask=won)
    if SUBTRACT > 1:
        tl.store(momentum + at, tl.zeros_like(value), mask=won)


@triton.jit
def _write_candidates(
    x, momentum, chunk, entry, low, last, to, base, count, kept, places, indices, values,
    VALUES: tl.constexpr, SUBTRACT: tl.constexpr,
):  # fmt: skip
    first, number = tl.load(entry + SLOT) + tl.load(base + chunk), tl.load(count + chunk)
    start = tl.load(entry + START)
    for j in range(0, number, WIDE):
        at = j + tl.arange(0, WIDE)
        live = at < number
        place = tl.load(places + first + at, mask=live, other=0).to(tl.int64)
        bits = tl.load(kept + first + at, mask=live, other=0)
        won = live & wins(bits & NEVER, place, low, last)
        slot = to + tl.cumsum(won.to(tl.int32), 0) - 1
        lies = x + start + place
        value = bits.to(tl.float32, bitcast=True) if x.dtype.element_ty == tl.float32 else tl.load(lies, mask=won)
        _store(x, momentum, start + place, value, slot, won, indices, values, VALUES, SUBTRACT)
        to += tl.sum(won.to(tl.int32), 0)


@triton.jit
def _write_chunk(
    x, momentum, chunk, entry, low, last, ties, to, indices, values, n,
    VALUES: tl.constexpr, SUBTRACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write down what lies above the last winner, and the first ``ties`` that tie with it no later than ``last``."""
    base, start, stop = stretch(chunk, entry, BLOCK)
    for i in range(0, (stop - base).to(tl.int32), _TILE):
        at = base + i + tl.arange(0, _TILE)
        value, inside = tile_of(x, base + i, start, stop, n, _TILE)
        key = key_of(value.to(tl.float32))
        above, equal = inside & (key > low), inside & (key == low) & (at - start <= last)
        both = above.to(tl.int32) + (equal.to(tl.int32) << 16)
        sums = tl.cumsum(both, 0) - both  # both before each entry, by one scan
        won = above | (equal & ((sums >> 16) < ties))
        slot = to + (sums & 0xFFFF) + tl.minimum(sums >> 16, ties)
        _store(x, momentum, at, value, slot, won, indices, values, VALUES, SUBTRACT)
        seen = tl.sum(both, 0)
        to += (seen & 0xFFFF) + tl.minimum(seen >> 16, ties)
        ties -= tl.minimum(seen >> 16, ties)


@triton.jit
def write(
    x, momentum, indices, values, was_nonfinite, table, chunk_segment, state, base, count, kept, places,
    sure, out, flags, n,
    VALUES: tl.constexpr, SUBTRACT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, line = table + segment * COLUMNS, state + segment * COLUMNS
    outcome, to, ties = tl.load(line + OUTCOME), tl.load(out + chunk), tl.load(sure + chunk)
    low, last = tl.load(line + KEY).to(tl.int32), tl.load(line + LAST)
    sparse = tl.load(entry + KIND) != DENSE
    if sparse & ((outcome == EXACT) | ((outcome == ZEROS) & (ties == 0))):
        _write_candidates(
            x, momentum, chunk, entry, low, last, to, base, count, kept, places, indices, values, VALUES, SUBTRACT
        )
    else:
        exact = outcome == EXACT  # then the last winner's place is known, else how many ties win in each chunk
        # Of very many equals the first win, and most chunks have no winner.
        if exact | (tl.load(count + chunk) + ties > 0):
            last = tl.where(exact, last, tl.load(entry + LENGTH))
            ties = tl.where(exact, NEVER, ties)
            _write_chunk(x, momentum, chunk, entry, low, last, ties, to, indices, values, n, VALUES, SUBTRACT, BLOCK)
    if chunk == 0:
        tl.store(was_nonfinite, tl.load(flags))
        tl.store(flags, 0)
        tl.store(flags + 1, 0)
