"""The last launch of a selection: write down the winners, in the order of their places, and settle them if asked.

A chunk in which zeros win, too, is read as it lies, and so is one of a long segment whose hint was of no use: `radix`
has counted its winners meanwhile. A shorter segment gathers candidates anew, now that `narrow` has found a bar, and its
last program does the rest alone: slower, but seldom, and with the same result. SETTLE: 1 takes winners off the debt, 2
also masks the momentum.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.census import gather
from gradwire.kernels.cuda.narrow import WIDE
from gradwire.kernels.cuda.plan import (
    AGAIN,
    BAR,
    CHUNK,
    CHUNKS,
    COLUMNS,
    COUNT,
    KEY,
    LAST,
    LEFT,
    LENGTH,
    LOST,
    MISSED,
    OUT,
    ROOM,
    SLOT,
    START,
    ZEROS,
)
from gradwire.kernels.cuda.radix import pass_over, write_chunk
from gradwire.kernels.cuda.search import TOP, WIDTH, last_tied, search, wins
from gradwire.kernels.cuda.sweep import key_of


@triton.jit
def _write(residual, momentum, at, to, won, indices, values, VALUES: tl.constexpr, SETTLE: tl.constexpr):
    tl.store(indices + to, at, mask=won)
    if VALUES:
        value = tl.load(residual + at, mask=won)
        tl.store(values + to, value, mask=won)
        if SETTLE > 0:  # what is sent as it is leaves nothing, unless it was infinite
            tl.store(residual + at, value - value, mask=won)
        if SETTLE > 1:
            tl.store(momentum + at, tl.zeros_like(value), mask=won)


@triton.jit
def _emit_chunk(
    residual, momentum, chunk, entry, low, last, floor, to, base, count, keys, places, indices, values,
    VALUES: tl.constexpr, SETTLE: tl.constexpr,
):  # fmt: skip
    """Write a chunk's winners from place ``floor`` on; returns where the next chunk's go."""
    first, number = tl.load(entry + SLOT) + tl.load(base + chunk), tl.load(count + chunk)
    start = tl.load(entry + START)
    for j in range(0, number, WIDE):
        at = j + tl.arange(0, WIDE)
        live = at < number
        place = tl.load(places + first + at, mask=live, other=0).to(tl.int64)
        won = live & wins(tl.load(keys + first + at, mask=live, other=-1), place, low, last) & (place >= floor)
        slot = to + tl.cumsum(won.to(tl.int32), 0) - 1
        _write(residual, momentum, start + place, slot, won, indices, values, VALUES, SETTLE)
        to += tl.sum(won.to(tl.int32), 0)
    return to


@triton.jit
def _emit_raw(
    residual, momentum, start, floor, low, last, to, indices, values, VALUES: tl.constexpr, SETTLE: tl.constexpr
):
    """Write the winners among the segment's first ``floor`` entries, reading them all."""
    for i in range(0, floor, WIDTH):
        at = i + tl.arange(0, WIDTH)
        key = key_of(tl.load(residual + start + at, mask=at < floor, other=0.0).to(tl.float32))
        won = (at < floor) & wins(key, at, low, last)
        slot = to + tl.cumsum(won.to(tl.int32), 0) - 1
        _write(residual, momentum, start + at, slot, won, indices, values, VALUES, SETTLE)
        to += tl.sum(won.to(tl.int32), 0)
    return to


@triton.jit
def _retry(
    residual, momentum, entry, line, edge, base, count, keys, places, indices, values,
    VALUES: tl.constexpr, SETTLE: tl.constexpr,
):  # fmt: skip
    start, length, wanted = tl.load(entry + START), tl.load(entry + LENGTH), tl.load(entry + COUNT)
    found, slot = tl.load(line + AGAIN), tl.load(entry + SLOT)
    bar = tl.load(line + BAR).to(tl.int32)
    low, last, floor = bar, tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    if found < wanted:  # zeros win, too: the first ones, which lie among the first ``wanted`` entries
        low = bar * 0
        last = last_tied(residual + start, places, wanted, low, wanted - found, wanted, True)
        floor = wanted
    elif found > tl.load(entry + ROOM):  # very many are equal
        low, last = search(residual + start, places, length, wanted, bar, bar * 0 + TOP, length, True)
        floor = length
    else:
        low, last = search(keys + slot, places + slot, found.to(tl.int32), wanted, bar, bar * 0 + TOP, length, False)
    tl.store(edge, low.to(tl.float32, bitcast=True))
    to = tl.load(entry + OUT)
    to = _emit_raw(residual, momentum, start, floor, low, last, to, indices, values, VALUES, SETTLE)
    if floor < length:
        first = tl.load(entry + CHUNK)
        for i in range(tl.load(entry + CHUNKS).to(tl.int32)):
            to = _emit_chunk(
                residual, momentum, first + i, entry, low, last, floor, to, base, count, keys, places, indices, values,
                VALUES, SETTLE,
            )  # fmt: skip


@triton.jit
def emit(
    residual, momentum, edge, indices, values, was_broken, table, chunk_segment, segments, state, words, base, count,
    keys, places, groups, sure, out, broken, n,
    DIGITS: tl.constexpr, VALUES: tl.constexpr, SETTLE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """DIGITS: where candidates were too few or too many, `radix` has found the last winner."""
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, line, edge_at = table + segment * COLUMNS, state + segment * COLUMNS, edge + segment
    missed, to, ties = tl.load(line + MISSED), tl.load(out + chunk), tl.load(sure + chunk)
    low, last = tl.load(line + KEY).to(tl.int32), tl.load(line + LAST)
    if (missed == LOST) & (not DIGITS):
        again = line + AGAIN
        gather(residual, chunk, entry, line, again, words, base, count, keys, places, groups, BLOCK)
        tl.debug_barrier()
        if tl.atomic_add(line + LEFT, 1) == tl.load(entry + CHUNKS) - 1:
            tl.debug_barrier()
            _retry(residual, momentum, entry, line, edge_at, base, count, keys, places, indices, values, VALUES, SETTLE)
            tl.debug_barrier()
            tl.store(line + LEFT, 0)
            tl.store(line + AGAIN, 0)
    elif (missed == LOST) | ((missed == ZEROS) & (ties > 0)):
        write_chunk(residual, momentum, chunk, entry, low, ties, to, indices, values, n, VALUES, SETTLE, WIDE, BLOCK)
    else:
        floor = tl.zeros([], tl.int64)
        _emit_chunk(
            residual, momentum, chunk, entry, low, last, floor, to, base, count, keys, places, indices, values,
            VALUES, SETTLE,
        )  # fmt: skip
    if chunk == 0:
        if VALUES:
            tl.store(was_broken, tl.load(broken))
            tl.store(broken, 0)
        pass_over(edge, table, segments)
