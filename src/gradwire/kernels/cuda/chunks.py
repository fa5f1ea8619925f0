"""The largest entries of every chunk: groups of eight by their largest, and then the entries of the best groups.

The ``k`` best entries lie in the ``k`` best groups, those whose own best entry is best. A program has one warp for 4096
entries, so that hardly a thread waits, and reads them once; after that it holds an eighth of them, and soon less.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.graph_refs import cached_on_device
from gradwire.kernels import chunks as plain
from gradwire.kernels.cuda.accumulate import fetch, readable
from gradwire.kernels.cuda.launch import form, launch
from gradwire.kernels.cuda.tables import definition, placed
from gradwire.kernels.cuda.topk.mark import key_of

_WIDEST = 16384  # a larger chunk does not fit into one program
_EACH = 4096  # entries of a warp
_CHOSEN = 512  # entries of chosen groups, likewise
_FEW = 8  # up to so many are found one after the other
_MOST_WARPS = 16
_REGISTERS = 128  # enough, and more programs fit side by side
_COLUMNS = tl.constexpr(5)  # of the table: start, length, first chunk, first result, and the chunk after the last
_GROUP = tl.constexpr(8)


@triton.jit
def _owner(table, segments, chunk):
    """The first segment that ends beyond a chunk."""
    low = chunk * 0
    high = low + segments - 1
    while low < high:
        middle = (low + high) // 2
        if tl.load(table + middle * _COLUMNS + 4) > chunk:
            high = middle
        else:
            low = middle + 1
    return low


@triton.jit
def _keys(x, at, live, MASKED: tl.constexpr):
    """The bits of magnitudes, which are in the same order; -1 where nothing is alive."""
    key = key_of(fetch(x, at, live, MASKED))
    return tl.where(live, key, -1) if MASKED else key


@triton.jit
def _tops(x, size, WIDTH: tl.constexpr, PART: tl.constexpr, MASKED: tl.constexpr):
    """The largest key of each group. A thread asks for PART entries together, has whole groups, and asks no others."""
    group, inside = tl.arange(0, WIDTH // _GROUP)[:, None], tl.arange(0, PART)[None, :]
    top = tl.full([WIDTH // _GROUP], -1, tl.int32)
    for part in tl.static_range(_GROUP // PART):
        at = group * _GROUP + part * PART + inside
        top = tl.maximum(top, tl.max(_keys(x, at, at < size, MASKED), 1))
    return top


@triton.jit
def _edge(key, wanted):
    """A key that so many reach; if equals stand in the way, the largest that no fewer do."""
    low, high = tl.maximum(tl.min(key, 0), 0), tl.max(key, 0)
    while low < high:
        middle = high - (high - low) // 2
        reached = tl.sum((key >= middle).to(tl.int32), 0)
        low = tl.where(reached >= wanted, middle, low)
        high = tl.where(reached > wanted, high, tl.where(reached == wanted, middle, middle - 1))
    return low


@triton.jit
def _winners(key, wanted):
    """Whether each of these wins, and how many winners are before it. Of equals the first win."""
    edge = _edge(key, wanted)
    above, tie = (key > edge).to(tl.int32), (key == edge).to(tl.int32)
    left = wanted - tl.sum(above, 0)
    both = tl.cumsum(above + (tie << 16), 0)
    won = (above != 0) | ((tie != 0) & ((both >> 16) <= left))
    return won, (both & 0xFFFF) + tl.minimum(both >> 16, left) - 1


@triton.jit
def _one_by_one(key, at, wanted, K: tl.constexpr):
    """The places of so many winners, the largest first; K of them, of which those that are not wanted lie outside."""
    slot = tl.arange(0, K)
    found = tl.full([K], 0x7FFFFFFF, tl.int32)
    for i in tl.static_range(K):
        first = tl.min(tl.where(key == tl.max(key, 0), at, 0x7FFFFFFF), 0)
        found = tl.where((slot == i) & (i < wanted), first, found)
        key = tl.where(at == first, -2, key)
    return found


@triton.jit
def _entries(x, groups, size, live, K: tl.constexpr):
    """Keys and places of all entries of some groups."""
    at = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
    key = _keys(x, at, live[:, None] & (at < size), True)
    return tl.reshape(key, [K * _GROUP]), tl.reshape(at, [K * _GROUP])


@triton.jit
def _choose_few(x, to, begin, top, size, wanted, some, K: tl.constexpr):
    """Write down the places of the winners, of which there are K at most."""
    groups = _one_by_one(top, tl.arange(0, top.shape[0]), some, K)
    live = tl.arange(0, K) < some
    key, at = _entries(x, tl.where(live, groups, 0), size, live, K)
    # Groups that are not there are at the places of others, but no entry of theirs is alive.
    found = _one_by_one(key, tl.where(key < 0, 0x7FFFFFFE, at), wanted, K)
    rank = tl.sum((found[None, :] < found[:, None]).to(tl.int32), 1)
    tl.store(to + rank, begin + found, mask=tl.arange(0, K) < wanted)


@triton.jit
def _choose_many(x, to, begin, top, size, wanted, some, K: tl.constexpr):
    """The same, for any number. Where the places will be is room for the groups."""
    won, rank = _winners(top, some)
    tl.store(to + rank, tl.arange(0, top.shape[0]).to(tl.int64), mask=won)
    tl.debug_barrier()
    live = tl.arange(0, K) < some
    groups = tl.load(to + tl.arange(0, K), mask=live, other=0).to(tl.int32)
    tl.debug_barrier()
    key, at = _entries(x, groups, size, live, K)
    won, rank = _winners(key, wanted)
    tl.store(to + rank, begin + at, mask=won)


@triton.jit
def _choose(
    x, out, table, segments, k,
    CHUNK: tl.constexpr, WIDTH: tl.constexpr, K: tl.constexpr, FEW: tl.constexpr, PART: tl.constexpr,
):  # fmt: skip
    chunk = tl.program_id(0).to(tl.int64)
    row = table + _owner(table, segments, chunk) * _COLUMNS
    i = chunk - tl.load(row + 2)
    begin, to = tl.multiple_of(tl.load(row) + i * CHUNK, PART), out + tl.load(row + 3) + i * k
    size = tl.minimum(tl.load(row + 1) - i * CHUNK, CHUNK).to(tl.int32)
    top = _tops(x + begin, size, WIDTH, PART, False) if size == WIDTH else _tops(x + begin, size, WIDTH, PART, True)
    wanted = tl.minimum(size, k)
    some = tl.minimum(wanted, (size + _GROUP - 1) // _GROUP)
    if FEW:
        _choose_few(x + begin, to, begin, top, size, wanted, some, K)
    else:
        _choose_many(x + begin, to, begin, top, size, wanted, some, K)


@cached_on_device(64)
def _table(lengths: tuple[int, ...], k: int, chunk: int, device: torch.device) -> Tensor:
    return torch.stack(plain.chunks(lengths, k, chunk)[:5], 1).contiguous().to(device)


@lru_cache(maxsize=64)
def _form(lengths: tuple[int, ...], k: int, chunk: int) -> tuple[tuple[Any, ...], int]:
    """The constants of the kernel, and how many warps it has."""
    width = max(triton.next_power_of_2(chunk), _GROUP.value)
    few, groups = k <= _FEW, width // _GROUP.value
    most = triton.next_power_of_2(k if few else min(k, groups))
    where = plain.chunks(lengths, k, chunk)
    odd = chunk % 4 or bool((where.start[where.length > 0] % 4).any())  # not all chunks begin at multiples of four
    warps = max(1, width // _EACH, most * _GROUP.value // _CHOSEN)
    return (chunk, width, most, few, 1 if odd else 4), min(warps, _MOST_WARPS)


@placed
def chunk_topk(x: Tensor, lengths: tuple[int, ...], k: int, chunk: int) -> Tensor:
    where = plain.chunks(lengths, k, chunk)
    if not where.chunks or chunk > _WIDEST or not readable(x):
        return definition(plain.chunk_topk)(x, lengths, k, chunk)
    out = torch.empty(where.total, dtype=torch.int64, device=x.device)
    fresh = (x, out, _table(lengths, k, chunk, x.device))
    constants, warps = _form(lengths, k, chunk)
    rest = (len(lengths), k, *constants)
    launch(_choose, where.chunks, (*rest, *form(*fresh)), fresh, rest, num_warps=warps, maxnreg=_REGISTERS)
    return out
