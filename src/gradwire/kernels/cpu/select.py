"""Top-k in one pass: collect what lies above a loose edge, then choose exactly among the few.

The edge comes from the last step where there is one, else from a histogram of magnitudes. It never decides the outcome:
a segment where it let too few or too many through is searched again by histogram.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu.feedback import accumulate_tile
from gradwire.kernels.cpu.threads import compiled, in_turn, serial
from gradwire.kernels.fused import Accumulation, Selected

_TILE = 4096  # a tile's target stays in the first-level cache until it has been searched
_SHIFT = 20  # histogram bins: the exponent and three bits of the mantissa
_BINS = 1 << 31 - _SHIFT
_SLACK = np.float32(0.75)  # what is kept of last step's edge: gradients vary from step to step
_MAGNITUDE = np.int32(0x7FFFFFFF)


class Tiles(NamedTuple):
    """Pieces of work, each inside one segment."""

    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    segment: NDArray[np.int64]
    first: NDArray[np.int64]  # of each segment, and one past the last
    room: NDArray[np.int64]  # where each tile's candidates go, and one past the last


@lru_cache(maxsize=64)
def _tiles(lengths: tuple[int, ...], counts: tuple[int, ...]) -> Tiles:
    n, k = np.array(lengths, dtype=np.int64), np.array(counts, dtype=np.int64)
    pieces = -(-n // _TILE)
    segment = np.repeat(np.arange(n.size), pieces)
    first = np.concatenate(([0], pieces.cumsum()))
    start = (n.cumsum() - n)[segment] + (np.arange(segment.size) - first[segment]) * _TILE
    stop = np.minimum(start + _TILE, n.cumsum()[segment])
    fair = k[segment] * (stop - start) // np.maximum(n[segment], 1)
    room = np.minimum(stop - start, 32 + 8 * fair)
    return Tiles(start, stop, segment, first, np.concatenate(([0], room.cumsum())))


@serial
def _collect(bits, start, edge, places, found):
    """Positions and magnitudes of a tile from the edge up; returns how many there are, room or not."""
    count = 0
    n = bits.size
    i = 0
    while i < n:
        stop = min(n, i + 64)
        top = np.int32(0)
        for j in range(i, stop):
            top = max(top, bits[j] & _MAGNITUDE)
        if top >= edge:
            for j in range(i, stop):
                size = bits[j] & _MAGNITUDE
                if size >= edge:
                    if count < places.size:
                        places[count] = start + j
                        found[count] = size
                    count += 1
        i = stop
    return count


@compiled
def _sweep(grad, residual, momentum, m, nesterov, decay, kind, tiles, edges, places, found, counts):
    """Accumulate tile by tile, and collect while the tile is still in cache. Returns whether all was finite."""
    start, stop, segment, _, room = tiles
    broken = np.zeros(start.size, dtype=np.uint8)
    for t in prange(start.size):
        a, b = start[t], stop[t]
        v = residual[a:b]
        broken[t] = accumulate_tile(grad[a:b], v, momentum[a:b], m, nesterov, decay, kind)
        where = slice(room[t], room[t + 1])
        counts[t] = _collect(v.view(np.int32), a, edges[segment[t]], places[where], found[where])
    return not broken.any()


@compiled
def _histogram(x, begin, end, lanes):
    """Counts of magnitudes by their leading bits, one row for each of a few stretches."""
    rows = np.zeros((lanes, _BINS), dtype=np.int64)
    each = (end - begin + lanes - 1) // lanes
    for r in prange(lanes):
        bits = x[begin + r * each : min(end, begin + (r + 1) * each)].view(np.int32)
        row = rows[r]
        for j in range(bits.size):
            row[(bits[j] & _MAGNITUDE) >> _SHIFT] += 1
    return rows


@compiled
def _gather(x, begin, end, edge, starts, places, found):
    """All positions of a segment from the edge up, given where each tile's begin."""
    for t in prange(starts.size - 1):
        a = begin + t * _TILE
        bits = x[a : min(end, a + _TILE)].view(np.int32)
        where = slice(starts[t], starts[t + 1])
        _collect(bits, a, edge, places[where], found[where])


@compiled
def _tally(x, begin, end, edge, counts):
    for t in prange(counts.size):
        a = begin + t * _TILE
        bits = x[a : min(end, a + _TILE)].view(np.int32)
        total = 0
        for j in range(bits.size):
            total += np.int64((bits[j] & _MAGNITUDE) >= edge)
        counts[t] = total


@serial
def _choose(places, found, k, out):
    """The k largest of rising candidates, in rising order; of equals the first. Returns the k-th magnitude."""
    edge = np.partition(found, found.size - k)[found.size - k]
    above = 0
    for i in range(found.size):
        above += np.int64(found[i] > edge)
    ties = k - above
    at = 0
    for i in range(found.size):
        if found[i] > edge:
            out[at] = places[i]
            at += 1
        elif found[i] == edge and ties > 0:
            out[at] = places[i]
            at += 1
            ties -= 1
    return edge


@compiled
def _choose_all(tiles, places, found, counts, ks, ends, out, edges, lost):
    """Choose in every segment whose candidates suffice and had room; report the others."""
    _, _, _, first, room = tiles
    for s in prange(ks.size):
        total = 0
        lost[s] = False
        for t in range(first[s], first[s + 1]):
            total += counts[t]
            lost[s] |= counts[t] > room[t + 1] - room[t]
        lost[s] |= total < ks[s]
        if lost[s] or ks[s] == 0:
            continue
        mine, sizes = np.empty(total, dtype=np.int64), np.empty(total, dtype=np.int32)
        at = 0
        for t in range(first[s], first[s + 1]):
            c = counts[t]
            mine[at : at + c] = places[room[t] : room[t] + c]
            sizes[at : at + c] = found[room[t] : room[t] + c]
            at += c
        edges[s] = _choose(mine, sizes, ks[s], out[ends[s] : ends[s + 1]])


def _by_histogram(x: NDArray[np.float32], begin: int, end: int, k: int) -> tuple[NDArray[np.int64], int]:
    """Exact top-k of one segment, whatever it holds: two more passes over it."""
    rows = _histogram(x, begin, end, 8)
    at_least = rows.sum(0)[::-1].cumsum()[::-1]
    edge = np.int32(int(np.nonzero(at_least >= k)[0][-1]) << _SHIFT)
    counts = np.empty(-(-(end - begin) // _TILE), dtype=np.int64)
    _tally(x, begin, end, edge, counts)
    starts = np.concatenate(([0], counts.cumsum()))
    places, found = np.empty(starts[-1], dtype=np.int64), np.empty(starts[-1], dtype=np.int32)
    _gather(x, begin, end, edge, starts, places, found)
    out = np.empty(k, dtype=np.int64)
    return out, int(_choose(places, found, k, out))


class _Search:
    """The candidates of all segments, and the choice among them."""

    def __init__(self, lengths: tuple[int, ...], counts: tuple[int, ...]) -> None:
        self.lengths, self.ks = lengths, np.array(counts, dtype=np.int64)
        self.tiles = _tiles(lengths, counts)
        self.places = np.empty(self.tiles.room[-1], dtype=np.int64)
        self.found = np.empty(self.tiles.room[-1], dtype=np.int32)
        self.counts = np.zeros(self.tiles.start.size, dtype=np.int64)

    def choose(self, x: NDArray[np.float32], swept: bool) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
        ends = np.concatenate(([0], self.ks.cumsum()))
        out, edges = np.empty(ends[-1], dtype=np.int64), np.zeros(self.ks.size, dtype=np.int32)
        lost = np.ones(self.ks.size, dtype=np.bool_)
        if swept:
            _choose_all(self.tiles, self.places, self.found, self.counts, self.ks, ends, out, edges, lost)
        starts = np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64)))
        for s in np.nonzero(lost & (self.ks > 0))[0]:
            place = slice(ends[s], ends[s + 1])
            out[place], edges[s] = _by_histogram(x, starts[s], starts[s + 1], int(self.ks[s]))
        return out, edges


@in_turn
def topk(x: Tensor, lengths: tuple[int, ...], counts: tuple[int, ...]) -> Tensor:
    indices, _ = _Search(lengths, counts).choose(x.detach().contiguous().numpy(), swept=False)
    return torch.from_numpy(indices)


@in_turn
def accumulate_topk_(
    grad: Tensor,
    residual: Tensor,
    momentum: Tensor | None,
    rule: Accumulation,
    lengths: tuple[int, ...],
    counts: tuple[int, ...],
    edge: Tensor | None,
) -> Selected:
    search = _Search(lengths, counts)
    v = residual.numpy()
    # No edge yet: let nothing pass, and search by histogram afterwards.
    edges = np.full(len(lengths), _MAGNITUDE) if edge is None else (edge.numpy() * _SLACK).view(np.int32)
    whole = _sweep(
        grad.detach().float().contiguous().numpy(),
        v,
        v if momentum is None else momentum.numpy(),
        np.float32(rule.momentum),
        rule.nesterov,
        np.float32(rule.decay),
        int(momentum is not None),
        tuple(search.tiles),
        edges,
        search.places,
        search.found,
        search.counts,
    )
    indices, found = search.choose(v, swept=edge is not None)
    chosen = torch.from_numpy(indices)
    return Selected(chosen, residual[chosen], torch.tensor(not whole), torch.from_numpy(found.view(np.float32)))


@in_turn
def settle_(residual: Tensor, momentum: Tensor | None, indices: Tensor, heard: Tensor) -> None:
    residual.index_add_(0, indices, heard, alpha=-1)
    if momentum is not None:
        momentum.index_fill_(0, indices, 0.0)
