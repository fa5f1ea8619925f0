"""Several ranks' sparse messages into one dense mean: no sum depends on which thread came first.

A program writes one tile of the result. All entries that lie there are compared with all others; of those for one
place, that of the lowest rank gets the sum, added in rank order, and writes it. So nobody waits for anybody.
"""

from functools import lru_cache
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels import fused
from gradwire.kernels.cuda.enter import readable
from gradwire.kernels.cuda.launch import form, launch
from gradwire.kernels.cuda.tables import definition, placed

_TILES = 256  # that are looked for together
_ENTRIES = 16  # of a rank that are looked at together
_RANKS = 8  # at most that many together


@triton.jit
def _cut(indices, cuts, bounds, tiles, blocks, TILE: tl.constexpr, TILES: tl.constexpr):
    """Where the entries of each tile start in each rank's message."""
    rank = tl.program_id(0) // blocks
    tile = (tl.program_id(0) % blocks) * TILES + tl.arange(0, TILES)
    low = tl.zeros([TILES], tl.int64) + tl.load(bounds + rank)
    high = tl.zeros([TILES], tl.int64) + tl.load(bounds + rank + 1)
    while tl.max(high - low, 0) > 0:
        middle = (low + high) // 2
        some = low < high
        below = tl.load(indices + middle, mask=some, other=0) < tile.to(tl.int64) * TILE
        low = tl.where(some & below, middle + 1, low)
        high = tl.where(some & ~below, middle, high)
    tl.store(cuts + rank * (tiles + 1) + tile, low, mask=tile <= tiles)


@triton.jit
def _add(values, indices, cut, base, place, rank, other, live, total, first, ENTRIES: tl.constexpr):
    """Add what another rank says at these places; whoever is not the lowest rank there is not the first."""
    start, stop = tl.load(cut, mask=live, other=0), tl.load(cut + 1, mask=live, other=0)
    for i in range(start, stop, ENTRIES):
        j = i + tl.arange(0, ENTRIES)
        at = (tl.load(indices + j, mask=j < stop, other=-1) - base).to(tl.int32)
        same = (place[:, None] == at[None, :]) & (j < stop)[None, :]
        value = tl.load(values + j, mask=j < stop, other=0.0)
        met = tl.max(same.to(tl.int32), 1) > 0
        # Positions differ within a message, so at most one of these is not zero.
        total = tl.where(met, total + tl.sum(tl.where(same, value[None, :], 0.0), 1), total)
        first = first & ~(met & (other < rank))
    return total, first


@triton.jit
def _scatter(
    values, indices, cuts, out, n, ranks, tiles, world,
    WHOLE: tl.constexpr, TILE: tl.constexpr, RANKS: tl.constexpr, ENTRIES: tl.constexpr,
):  # fmt: skip
    """WHOLE: nothing is divided."""
    tile = tl.program_id(0)
    base = tile.to(tl.int64) * TILE
    at = tl.arange(0, TILE)
    if base + TILE <= n:
        tl.store(out + base + at, tl.zeros([TILE], tl.float32))
    else:
        tl.store(out + base + at, tl.zeros([TILE], tl.float32), mask=at < n - base)
    tl.debug_barrier()  # no zero may come after a sum
    cuts += tile
    for group in range(0, ranks, RANKS):
        rank = group + tl.arange(0, RANKS * ENTRIES) // ENTRIES
        live = rank < ranks
        start = tl.load(cuts + rank * (tiles + 1), mask=live, other=0)
        stop = tl.load(cuts + rank * (tiles + 1) + 1, mask=live, other=0)
        for i in range(0, tl.max(stop - start, 0), ENTRIES):
            j = start + i + tl.arange(0, RANKS * ENTRIES) % ENTRIES
            some = j < stop
            place = tl.where(some, (tl.load(indices + j, mask=some, other=0) - base).to(tl.int32), -2)
            total, first = tl.zeros([RANKS * ENTRIES], tl.float32), some
            for one in range(0, ranks, RANKS):
                for k in tl.static_range(RANKS):  # side by side, so that one wait is enough for all
                    other = one + k
                    cut = cuts + other * (tiles + 1)
                    total, first = _add(
                        values, indices, cut, base, place, rank, other, other < ranks, total, first, ENTRIES
                    )
            if not WHOLE:
                total = tl.div_rn(total, tl.zeros_like(total) + world)
            tl.store(out + base + place, total, mask=first)


@placed
def scatter_mean(values: Tensor, indices: Tensor, bounds: tuple[int, ...], n: int, world: int) -> Tensor:
    """As defined, for positions that rise within each rank's message."""
    ranks = len(bounds) - 1
    if values.dtype != torch.float32 or not (readable(values) and indices.is_contiguous()) or n == 0 or ranks < 1:
        return definition(fused.scatter_mean)(values, indices, bounds, n, world)
    out = torch.empty(n, device=values.device)
    tile = _tile(n, max(b - a for a, b in pairwise(bounds)))
    tiles = -(-n // tile)
    blocks = -(-(tiles + 1) // _TILES)
    cuts = torch.empty(ranks, tiles + 1, dtype=torch.int64, device=values.device)
    facts = (n, bounds, world, *form(values, indices))
    rest = (_table(bounds, values.device), tiles, blocks, tile, _TILES)
    launch(_cut, ranks * blocks, facts, (indices, cuts), rest, num_warps=4)
    together = min(_RANKS, triton.next_power_of_2(ranks))
    about = (n, ranks, tiles, float(world), world == 1, tile, together, _ENTRIES)
    launch(_scatter, tiles, facts, (values, indices, cuts, out), about, num_warps=4)
    return out


def _tile(n: int, most: int) -> int:
    """A tile in which a rank has about half as many entries as are looked at together."""
    wanted = n * _ENTRIES // (2 * max(most, 1))
    return int(min(max(triton.next_power_of_2(wanted + 1) // 2, 256), 8192))


@lru_cache(maxsize=256)
def _table(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)
