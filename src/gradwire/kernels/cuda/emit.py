"""The last launch of a selection: write down the winners, in the order of their places.

A segment whose hint was of no use gathers candidates anew, now that `narrow` has found a bar, and its last program does
the rest alone: slower, but seldom, and with the same result.
"""

import triton
import triton.language as tl

from gradwire.kernels.cuda.census import first_row, gather
from gradwire.kernels.cuda.narrow import ACROSS, candidates, most
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
    MISSED,
    OUT,
    ROOM,
    ROWS,
    SLOT,
    START,
)
from gradwire.kernels.cuda.search import TOP, WIDTH, last_tied, search, wins
from gradwire.kernels.cuda.sweep import key_of

MOST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _write(residual, at, to, won, indices, values, VALUES: tl.constexpr):
    tl.store(indices + to, at, mask=won)
    if VALUES:
        tl.store(values + to, tl.load(residual + at, mask=won), mask=won)


@triton.jit
def _winners(row, end, j, entry, low, last, floor, row_base, row_count, keys, places):
    slot, live = candidates(row, end, j, entry, row_base, row_count)
    place = tl.load(places + slot, mask=live, other=0).to(tl.int64)
    won = live & wins(tl.load(keys + slot, mask=live, other=-1), place, low, last) & (place >= floor)
    return place, won.to(tl.int32)


@triton.jit
def _emit_chunk(
    residual,
    chunk,
    entry,
    low,
    last,
    floor,
    to,
    row_base,
    row_count,
    keys,
    places,
    indices,
    values,
    VALUES: tl.constexpr,
):
    """Write a chunk's winners from place ``floor`` on; returns where the next chunk's go."""
    row, end = first_row(chunk, entry)
    deep, start = most(row, end, row_count), tl.load(entry + START)
    number = tl.zeros([ROWS], tl.int32)
    for j in range(0, deep, ACROSS):
        _, won = _winners(row, end, j, entry, low, last, floor, row_base, row_count, keys, places)
        number += tl.sum(won, 1)
    done = to + tl.cumsum(number, 0) - number
    for j in range(0, deep, ACROSS):
        place, won = _winners(row, end, j, entry, low, last, floor, row_base, row_count, keys, places)
        slot = done[:, None] + tl.cumsum(won, 1) - won
        _write(residual, start + place, slot, won > 0, indices, values, VALUES)
        done += tl.sum(won, 1)
    return to + tl.sum(number, 0)


@triton.jit
def _emit_raw(residual, start, floor, low, last, to, indices, values, VALUES: tl.constexpr):
    """Write the winners among the segment's first ``floor`` entries, reading them all."""
    for i in range(0, floor, WIDTH):
        at = i + tl.arange(0, WIDTH)
        key = key_of(tl.load(residual + start + at, mask=at < floor, other=0.0).to(tl.float32))
        won = (at < floor) & wins(key, at, low, last)
        slot = to + tl.cumsum(won.to(tl.int32), 0) - 1
        _write(residual, start + at, slot, won, indices, values, VALUES)
        to += tl.sum(won.to(tl.int32), 0)
    return to


@triton.jit
def _retry(residual, entry, line, edge, row_base, row_count, keys, places, indices, values, VALUES: tl.constexpr):
    start, length, count = tl.load(entry + START), tl.load(entry + LENGTH), tl.load(entry + COUNT)
    found, slot = tl.load(line + AGAIN), tl.load(entry + SLOT)
    bar = tl.load(line + BAR).to(tl.int32)
    low, last, floor = bar, tl.zeros([], tl.int64), tl.zeros([], tl.int64)
    if found < count:  # zeros win, too: the first ones, which lie among the first ``count`` entries
        low = bar * 0
        last = last_tied(residual + start, places, count, low, count - found, count, True)
        floor = count
    elif found > tl.load(entry + ROOM):  # very many are equal
        low, last = search(residual + start, places, length, count, bar, bar * 0 + TOP, length, True)
        floor = length
    else:
        low, last = search(keys + slot, places + slot, found.to(tl.int32), count, bar, bar * 0 + TOP, length, False)
    tl.store(edge, low.to(tl.float32, bitcast=True))
    to = _emit_raw(residual, start, floor, low, last, tl.load(entry + OUT), indices, values, VALUES)
    if floor < length:
        first = tl.load(entry + CHUNK)
        for i in range(tl.load(entry + CHUNKS).to(tl.int32)):
            to = _emit_chunk(
                residual,
                first + i,
                entry,
                low,
                last,
                floor,
                to,
                row_base,
                row_count,
                keys,
                places,
                indices,
                values,
                VALUES,
            )


@triton.jit
def emit(
    residual, table, chunk_segment, segments, edge, state, row_base, row_count, keys, places, out, broken,
    indices, values, was_broken,
    VALUES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0)
    segment = tl.load(chunk_segment + chunk)
    entry, line, edge_at = table + segment * COLUMNS, state + segment * COLUMNS, edge + segment
    if tl.load(line + MISSED) != 0:
        gather(residual, chunk, entry, line, line + AGAIN, line, row_base, row_count, keys, places, False, BLOCK)
        tl.debug_barrier()
        if tl.atomic_add(line + LEFT, 1) == tl.load(entry + CHUNKS) - 1:
            tl.debug_barrier()
            _retry(residual, entry, line, edge_at, row_base, row_count, keys, places, indices, values, VALUES)
            tl.debug_barrier()
            tl.store(line + LEFT, 0)
            tl.store(line + AGAIN, 0)
    else:
        low, last = tl.load(line + KEY).to(tl.int32), tl.load(line + LAST)
        floor = tl.zeros([], tl.int64)
        to = tl.load(out + chunk)
        _emit_chunk(
            residual, chunk, entry, low, last, floor, to, row_base, row_count, keys, places, indices, values, VALUES
        )
    if chunk == 0:
        if VALUES:
            tl.store(was_broken, tl.load(broken))
            tl.store(broken, 0)
        for i in range(0, segments, 128):  # segments of which nothing is wanted have no program of their own
            at = i + tl.arange(0, 128)
            none = (at < segments) & (tl.load(table + at * COLUMNS + COUNT, mask=at < segments, other=1) == 0)
            tl.store(edge + at, tl.full([128], MOST, tl.float32), mask=none)
