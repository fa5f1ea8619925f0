"""Several ranks' sparse messages into one dense mean: no sum depends on which thread came first.

A program writes one tile of the result: zeros first, then rank after rank adds its entries there, and all threads wait
before the next rank's turn. Positions differ within a message, so threads never meet. Where each rank has
only a few entries in the tile, every entry is held by a thread from the start; elsewhere ranks read theirs in turn.
"""

from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.core.graph_refs import cached_on_device
from gradwire.core.layout import Flat
from gradwire.kernels import fused, momentum
from gradwire.kernels.cuda.launch import form, launch
from gradwire.kernels.cuda.places import by_tile, place_of
from gradwire.kernels.cuda.tables import definition, placed

_TILES = 256  # that are looked for together
_ENTRIES = 16  # of a rank, that are held from the start,
_HELD = 64  # or more, where ranks are few: so many of all ranks
_RANKS = 64  # at most, for that
_CHUNK = 512  # entries of a rank that are read in turn


@triton.jit
def _cut(indices, cuts, bounds, n, tiles, blocks, steps, TILE: tl.constexpr, TILES: tl.constexpr):
    """Where the entries of each tile start in each rank's message. ``steps``: bits of the longest one's length."""
    rank = tl.program_id(0) // blocks
    tile = (tl.program_id(0) % blocks) * TILES + tl.arange(0, TILES)
    low = tl.zeros([TILES], tl.int64) + tl.load(bounds + rank)
    high = tl.zeros([TILES], tl.int64) + tl.load(bounds + rank + 1)
    edge = tl.minimum(tile.to(tl.int64) * TILE, n)
    for _ in range(steps):
        middle = (low + high) // 2
        some = low < high
        below = tl.load(indices + middle, mask=some, other=0) < edge
        low = tl.where(some & below, middle + 1, low)
        high = tl.where(some & ~below, middle, high)
    tl.store(cuts + rank * (tiles + 1) + tile, low, mask=tile <= tiles)


@triton.jit
def _finish(out, at, live, factor, world, SENT: tl.constexpr, WHOLE: tl.constexpr, TIMES: tl.constexpr):
    """Make means of sums. WHOLE: nothing is divided. TIMES: means are multiplied by a factor.

    SENT: something was sent to all these places. Where nothing was, a factor need not be finite, and does not count.
    """
    total = tl.load(out + at, mask=live, other=0.0)
    if not WHOLE:
        total = tl.div_rn(total, tl.zeros_like(total) + world)
    if TIMES:
        times = tl.load(factor + at, mask=live, other=0.0)
        total = tl.where((total != 0.0) | (tl.abs(times) < float("inf")) | SENT, total * times, total)
    tl.debug_barrier()  # of several entries for one place, all must find the sum
    tl.store(out + at, total, mask=live)


@triton.jit
def _place(indices, j, live, first, room):
    """Where in a tile entries go, and whether they do: positions of a corrupt message need not rise."""
    at = tl.load(indices + j, mask=live, other=0) - first
    return at.to(tl.int32), live & (at >= 0) & (at < room)


@triton.jit
def _add_held(
    values, indices, out, factor, start, stop, rank, slot, first, room, ranks, world,
    WHOLE: tl.constexpr, TIMES: tl.constexpr,
):  # fmt: skip
    """Entry ``start + slot`` of each rank, if that is before ``stop``."""
    j = start + slot
    at, some = _place(indices, j, j < stop, first, room)
    value = tl.load(values + j, mask=some, other=0.0)
    to = out + at
    tl.debug_barrier()  # no zero may come after a sum
    for turn in range(ranks):
        mine = some & (rank == turn)
        total = tl.load(to, mask=mine, other=0.0) + value
        tl.store(to, total, mask=mine)
        tl.debug_barrier()
    if TIMES or not WHOLE:
        _finish(out, at, some, factor, world, True, WHOLE, TIMES)


@triton.jit
def _add_in_turn(
    values, indices, out, factor, cuts, tiles, first, room, ranks, world,
    WHOLE: tl.constexpr, TIMES: tl.constexpr, TILE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    tl.debug_barrier()
    for turn in range(ranks):
        start, stop = tl.load(cuts + turn * (tiles + 1)), tl.load(cuts + turn * (tiles + 1) + 1)
        for i in range(start, stop, CHUNK):
            j = i + tl.arange(0, CHUNK)
            at, some = _place(indices, j, j < stop, first, room)
            total = tl.load(out + at, mask=some, other=0.0) + tl.load(values + j, mask=some, other=0.0)
            tl.store(out + at, total, mask=some)
        tl.debug_barrier()
    if TIMES or not WHOLE:
        for i in range(0, TILE, CHUNK):
            at = i + tl.arange(0, CHUNK)
            _finish(out, at, at < room, factor, world, False, WHOLE, TIMES)
    if TIMES:
        tl.debug_barrier()
        for turn in range(ranks):
            start, stop = tl.load(cuts + turn * (tiles + 1)), tl.load(cuts + turn * (tiles + 1) + 1)
            for k in range(start, stop, CHUNK):
                at, some = _place(indices, k + tl.arange(0, CHUNK), k + tl.arange(0, CHUNK) < stop, first, room)
                zero = tl.load(out + at, mask=some, other=1.0) == 0.0
                _finish(out, at, some & zero, factor, world, True, True, TIMES)


@triton.jit
def _scatter(
    values, indices, cuts, out, factor, n, ranks, tiles, world,
    WHOLE: tl.constexpr, TIMES: tl.constexpr, HOW: tl.constexpr, TILE: tl.constexpr, RANKS: tl.constexpr,
    ENTRIES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """HOW: how the mean lies, see `places`."""
    tile = tl.program_id(0)
    base = tile.to(tl.int64) * TILE
    cuts += tile
    rank, slot = tl.arange(0, RANKS * ENTRIES) // ENTRIES, tl.arange(0, RANKS * ENTRIES) % ENTRIES
    start = tl.load(cuts + rank * (tiles + 1), mask=rank < ranks, other=0)
    stop = tl.load(cuts + rank * (tiles + 1) + 1, mask=rank < ranks, other=0)
    at = tl.arange(0, TILE)
    out = place_of(out, tile, base, HOW)
    factor += base
    room = tl.minimum(n - base, TILE).to(tl.int32)
    if room == TILE:
        tl.store(out + at, tl.zeros([TILE], tl.float32))
    else:
        tl.store(out + at, tl.zeros([TILE], tl.float32), mask=at < room)
    most = tl.max(stop - start, 0)
    if (most <= ENTRIES) & (ranks <= RANKS):
        if most > 0:
            _add_held(
                values, indices, out, factor, start, stop, rank, slot, base, room, ranks, world, WHOLE, TIMES
            )  # fmt: skip
    else:
        _add_in_turn(
            values, indices, out, factor, cuts, tiles, base, room, ranks, world, WHOLE, TIMES, TILE, CHUNK
        )  # fmt: skip


@placed
def scatter_mean(values: Tensor, indices: Tensor, bounds: tuple[int, ...], n: int, world: int) -> Tensor:
    """As defined, for positions that rise within each rank's message."""
    if n == 0 or len(bounds) < 2 or not _walkable(values, indices):
        return definition(fused.scatter_mean)(values, indices, bounds, n, world)
    out = torch.empty(n, device=values.device)
    _write(out, values, indices, bounds, world)
    return out


@placed
def scatter_mean_(out: Flat, values: Tensor, indices: Tensor, bounds: tuple[int, ...], world: int) -> None:
    """Likewise."""
    if out.numel() == 0 or len(bounds) < 2 or not (_walkable(values, indices) and _takes(out)):
        definition(fused.scatter_mean_)(out, values, indices, bounds, world)
    else:
        _write(out, values, indices, bounds, world)


@placed
def scatter_product_(
    out: Flat, values: Tensor, indices: Tensor, bounds: tuple[int, ...], world: int, factor: Tensor
) -> None:
    """Likewise, in one pass."""
    fits = len(bounds) > 1 and factor.numel() > 0 and _walkable(values, indices) and _walkable(factor, indices)
    if fits and _takes(out):
        _write(out, values, indices, bounds, world, factor)
    else:
        definition(momentum.scatter_product_)(out, values, indices, bounds, world, factor)


def _walkable(numbers: Tensor, indices: Tensor) -> bool:
    return numbers.dtype == torch.float32 and numbers.is_contiguous() and indices.is_contiguous()


def _takes(out: Flat) -> bool:
    """Whether a mean can be written there. Vectors in several places are float32."""
    return not isinstance(out, Tensor) or (out.dtype == torch.float32 and out.is_contiguous())


def _write(
    out: Flat, values: Tensor, indices: Tensor, bounds: tuple[int, ...], world: int, factor: Tensor | None = None
) -> None:
    """Write the mean, times a factor, where it lies, if no tile lies in two places; else by way of a copy."""
    n, ranks = out.numel(), len(bounds) - 1
    most = max(b - a for a, b in pairwise(bounds))
    together = min(_RANKS, triton.next_power_of_2(ranks))
    entries = max(_ENTRIES, _HELD // together)
    tile, place = _placed_tiles(out, _tile(n, most, entries))
    if place is None:
        dense = torch.empty(n, device=values.device)
        _write(dense, values, indices, bounds, world, factor)
        out.copy_(dense)
        return
    tiles = -(-n // tile)
    blocks = -(-(tiles + 1) // _TILES)
    cuts = torch.empty(ranks, tiles + 1, dtype=torch.int64, device=values.device)
    fresh = (values, indices, cuts, place[0], values if factor is None else factor)
    facts = (n, tile, bounds, world, factor is None, place[1], *form(*fresh))  # a gradient may lie anywhere
    rest = (_table(bounds, values.device), n, tiles, blocks, most.bit_length(), tile, _TILES)
    launch(_cut, ranks * blocks, facts, (indices, cuts), rest, num_warps=4)
    how = world == 1, factor is not None, place[1]
    about = (n, ranks, tiles, float(world), *how, tile, together, entries, _CHUNK)
    launch(_scatter, tiles, facts, fresh, about, num_warps=8, maxnreg=32 if together <= 16 else 64)


def _placed_tiles(out: Flat, tile: int) -> tuple[int, tuple[Tensor, int] | None]:
    """A tile of so many entries, or of fewer, and where tiles lie; None: any tile would lie in two places."""
    place = by_tile(out, tile)
    while place is None and tile > _CHUNK:
        tile //= 2
        place = by_tile(out, tile)
    return tile, place


def _tile(n: int, most: int, entries: int) -> int:
    """A tile in which a rank has about half as many entries as are held at once."""
    wanted = n * entries // (2 * max(most, 1))
    return int(min(max(triton.next_power_of_2(wanted + 1) // 2, _CHUNK), 8192))


@cached_on_device(256)
def _table(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=device)
