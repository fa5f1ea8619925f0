"""Top-k in one pass: collect what lies above a loose edge, then choose exactly among the few.

The edge comes from the last step where there is one, else from a sample. It grows and shrinks with the target, whose
level a few of its values tell before it is made. It never decides the outcome: a segment where it let too few or too
many through is searched again.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from gradwire.kernels.cpu.candidates import MAGNITUDE, SMALLEST, choose, collect, guess
from gradwire.kernels.cpu.feedback import accumulate_tile, carry
from gradwire.kernels.cpu.halves import Gradient, gradient, plain, stretch
from gradwire.kernels.cpu.pieces import whole
from gradwire.kernels.cpu.threads import compiled, in_turn, serial
from gradwire.kernels.fused import Accumulation, Selected

_TILE = 1024  # a tile of five vectors fits into the first-level cache
_SHIFT = 20  # histogram bins: the exponent and three bits of the mantissa
_BINS = 1 << 31 - _SHIFT
_RESIDUAL, _MOMENTUM, _AS_IT_IS = range(3)
_NONE = np.zeros(0, dtype=np.float32)


class Work(NamedTuple):
    """Tiles, the segments that they lie in, and how many candidates there should be."""

    start: NDArray[np.int64]  # of tiles, each inside one segment
    stop: NDArray[np.int64]
    segment: NDArray[np.int64]
    offsets: NDArray[np.int64]  # of segments, and one past the last
    first: NDArray[np.int64]  # tile of each segment, and one past the last
    ks: NDArray[np.int64]
    ends: NDArray[np.int64]  # where each segment's choice begins, and one past the last
    wanted: NDArray[np.int64]  # candidates


@lru_cache(maxsize=64)
def _work(lengths: tuple[int, ...], counts: tuple[int, ...]) -> Work:
    n = np.array(lengths, dtype=np.int64)
    k = np.minimum(np.array(counts, dtype=np.int64), n)
    tiles = whole(lengths, _TILE)
    first = np.searchsorted(tiles.segment, np.arange(n.size + 1))
    # After a step in which k were sent, about twice as many remain above the edge, and some are new.
    wanted = np.minimum(3 * k, k + (n - k + 3) // 4)
    return Work(*tiles[:3], _running(n), first, k, _running(k), wanted)


def _running(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate((np.zeros(1, dtype=np.int64), numbers.cumsum()))


@compiled
def _sweep(
    grad, before, residual, momentum, m, nesterov, decay, kind, work, edges, taken, places, found, first, counts, bad
):
    """Accumulate tile by tile, and collect while the tile is still in cache.

    What lies in ``before``, a residual and a momentum, is carried over first, where it holds anything.
    """
    old_residual, old_momentum = before
    for t in prange(counts.size):
        a, b = work.start[t], work.stop[t]
        v = residual[a:b]
        if old_residual.size:
            carry(old_residual[a:b], v)
        if old_momentum.size:
            carry(old_momentum[a:b], momentum[a:b])
        if kind != _AS_IT_IS:
            bad[t] = accumulate_tile(stretch(grad, a, b), v, momentum[a:b], m, nesterov, decay, kind)
        first[t], counts[t] = collect(v.view(np.int32), edges[work.segment[t]], taken, places, found)


@serial
def _level(grad, start, residual, momentum, m, nesterov, decay, kind):
    """The mean magnitude of a target that is not there yet, of up to 64 lines of neighbors."""
    n = residual.size
    lines = max(1, min(64, n // 16))
    total = np.float32(0.0)
    for i in range(lines):
        a, b = i * (n // lines), min(n, i * (n // lines) + 16)
        line = stretch(grad, start + a, start + b)
        for j in range(a, b):
            g = line[j - a]
            target = decay * residual[j] + g
            if kind == _MOMENTUM:
                target = residual[j] + m * (momentum[j] + g) + g
                if not nesterov:
                    target = residual[j] + m * momentum[j] + g
            total += abs(target) if np.isfinite(target) else np.float32(0.0)
    return total / np.float32(lines)


@compiled
def _follow(grad, residual, momentum, m, nesterov, decay, kind, work, levels, edges):
    """Take the levels of all segments, and move edges of the last step as much as those have moved."""
    for s in prange(levels.size):
        own = slice(work.offsets[s], work.offsets[s + 1])
        last = levels[s]
        now = _level(grad, work.offsets[s], residual[own], momentum[own], m, nesterov, decay, kind)
        if now > 0.0 and last > 0.0:
            edges[s] *= min(max(now / last, np.float32(0.5)), np.float32(2.0))
        levels[s] = now


@compiled
def _guess_all(x, work, edges):
    for s in prange(edges.size):
        segment = x[work.offsets[s] : work.offsets[s + 1]]
        if work.ks[s]:
            edges[s] = guess(segment.view(np.int32), work.ks[s])


@compiled
def _choose_all(work, places, found, first, counts, indices, values, edges, lost):
    """Choose in every segment whose candidates suffice and had room; report the others."""
    for s in prange(edges.size):
        a, b = work.first[s], work.first[s + 1]
        k = work.ks[s]
        lost[s] = counts[a:b].sum() < k
        for t in range(a, b):
            lost[s] |= first[t] + counts[t] > places.size
        if k and not lost[s]:
            mine = slice(work.ends[s], work.ends[s + 1])
            edges[s] = choose(
                work.start[a:b],
                first[a:b],
                counts[a:b],
                places,
                found,
                k,
                work.wanted[s],
                indices[mine],
                values[mine],
            )


@compiled
def _histogram(x, lanes):
    """Counts of magnitudes by their leading bits, one row for each of a few stretches."""
    rows = np.zeros((lanes, _BINS), dtype=np.int64)
    each = (x.size + lanes - 1) // lanes
    for r in prange(lanes):
        bits = x[r * each : (r + 1) * each].view(np.int32)
        for j in range(bits.size):
            rows[r, (bits[j] & MAGNITUDE) >> _SHIFT] += 1
    return rows


class _Search:
    """The candidates of all segments, and the choice among them."""

    def __init__(self, work: Work, room: int | None = None) -> None:
        self.work = work
        tiles, segments, chosen = work.start.size, work.ks.size, int(work.ends[-1])
        room = 64 + 2 * int(work.wanted.sum()) if room is None else room
        self.places, self.found = np.empty(room, dtype=np.uint16), np.empty(room, dtype=np.int32)
        self.taken = np.zeros(1, dtype=np.int64)
        self.first, self.counts = np.zeros(tiles, dtype=np.int64), np.zeros(tiles, dtype=np.int64)
        self.broken = np.zeros(tiles, dtype=np.bool_)
        self.indices, self.values = np.empty(chosen, dtype=np.int64), np.empty(chosen, dtype=np.int32)
        self.edges, self.lost = np.zeros(segments, dtype=np.int32), np.zeros(segments, dtype=np.bool_)

    def sweep(
        self,
        grad: Gradient,
        residual: NDArray[np.float32],
        momentum: NDArray[np.float32],
        rule: Accumulation,
        kind: int,
        edges: NDArray[np.int32],
        before: tuple[NDArray[np.float32], NDArray[np.float32]] = (_NONE, _NONE),
    ) -> None:
        numbers = np.float32(rule.momentum), rule.nesterov, np.float32(rule.decay), kind
        found = self.taken, self.places, self.found, self.first, self.counts, self.broken
        _sweep(grad, before, residual, momentum, *numbers, self.work, edges, *found)

    def look(self, x: NDArray[np.float32], edges: NDArray[np.int32] | None = None) -> None:
        """Collect in values that stay as they are, from some edges up; by default from guessed ones."""
        if edges is None:
            edges = np.zeros(self.edges.size, dtype=np.int32)
            _guess_all(x, self.work, edges)
        self.sweep(plain(x), x, x, Accumulation(), _AS_IT_IS, edges)

    def choose(self, x: NDArray[np.float32]) -> None:
        found = self.places, self.found, self.first, self.counts
        _choose_all(self.work, *found, self.indices, self.values, self.edges, self.lost)
        for s in np.nonzero(self.lost)[0]:
            begin, stop = self.work.offsets[s : s + 2]
            again = _thorough(x[begin:stop], int(self.work.ks[s]))
            mine = slice(*self.work.ends[s : s + 2])
            self.indices[mine], self.values[mine] = again.indices + begin, again.values
            self.edges[s] = again.edges[0]


def _thorough(x: NDArray[np.float32], k: int) -> _Search:
    """The choice in one segment, whatever it holds: two more passes over it."""
    work = _work((x.size,), (k,))
    at_least = _histogram(x, 8).sum(0)[::-1].cumsum()[::-1]
    if at_least[SMALLEST >> _SHIFT] < k:
        return _with_zeros(x, work)
    wanted = min(work.wanted[0], at_least[SMALLEST >> _SHIFT])
    bin_ = int(np.nonzero(at_least >= wanted)[0][-1])
    search = _Search(work, int(at_least[bin_]))
    search.look(x, np.full(1, bin_ << _SHIFT, dtype=np.int32))
    search.choose(x)
    return search


@serial
def _pass(bits, small, indices, values):
    """All but the small, and the first so many of those."""
    at = 0
    for j in range(bits.size):
        size = bits[j] & MAGNITUDE
        if size >= SMALLEST or (size == 0 and small > 0):
            small -= np.int64(size == 0)
            indices[at], values[at] = j, bits[j]
            at += 1
            if at == indices.size:
                return


def _with_zeros(x: NDArray[np.float32], work: Work) -> _Search:
    """The choice where it must take zeros too: all others, and the first of those."""
    bits, k = x.view(np.int32), int(work.ks[0])
    size = bits & MAGNITUDE
    others = int(np.count_nonzero(size))
    search = _Search(work, 0)
    if np.count_nonzero(size >= SMALLEST) < others:  # some are neither zero nor normal, which hardly ever happens
        order = np.sort(np.argsort(-size.astype(np.int64), kind="stable")[:k])
        search.indices[:], search.values[:] = order, bits[order]
    else:
        _pass(bits, k - others, search.indices, search.values)
    search.edges[0] = SMALLEST
    return search


@in_turn
def topk(x: Tensor, lengths: tuple[int, ...], counts: tuple[int, ...]) -> Tensor:
    search, values = _Search(_work(lengths, counts)), x.detach().float().contiguous().numpy()
    search.look(values)
    search.choose(values)
    return torch.from_numpy(search.indices)


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
    return _accumulate_topk(grad, (_NONE, _NONE), residual, momentum, rule, lengths, counts, edge)


@in_turn
def carry_topk_(
    grad: Tensor,
    before: tuple[Tensor, Tensor | None],
    after: tuple[Tensor, Tensor | None],
    rule: Accumulation,
    lengths: tuple[int, ...],
    counts: tuple[int, ...],
    edge: Tensor | None,
) -> Selected:
    residual, momentum = before
    old = residual.numpy(), _NONE if momentum is None else momentum.numpy()
    if residual is after[0]:
        old = _NONE, _NONE
    return _accumulate_topk(grad, old, *after, rule, lengths, counts, edge)


def _accumulate_topk(
    grad: Tensor,
    before: tuple[NDArray[np.float32], NDArray[np.float32]],
    residual: Tensor,
    momentum: Tensor | None,
    rule: Accumulation,
    lengths: tuple[int, ...],
    counts: tuple[int, ...],
    edge: Tensor | None,
) -> Selected:
    search = _Search(_work(lengths, counts))
    g, v = gradient(grad), residual.numpy()
    u, kind = (v, _RESIDUAL) if momentum is None else (momentum.numpy(), _MOMENTUM)
    # The edges of the last step, and the levels that they belonged to.
    known = edge is not None and edge.shape == (2, len(lengths))
    hints = edge.numpy().copy() if edge is not None and known else np.zeros((2, len(lengths)), dtype=np.float32)
    edges, levels = hints
    old_v, old_u = (old if old.size else new for old, new in zip(before, (v, u), strict=True))
    numbers = np.float32(rule.momentum), rule.nesterov, np.float32(rule.decay), kind
    _follow(g, old_v, old_u, *numbers, search.work, levels, edges)
    # Without an edge nothing passes, and candidates are looked for afterwards.
    search.sweep(g, v, u, rule, kind, edges.view(np.int32) if known else np.full(len(lengths), MAGNITUDE), before)
    if not known:
        search.look(v)
    search.choose(v)
    edges[:] = search.edges.view(np.float32)
    return Selected(
        torch.from_numpy(search.indices),
        torch.from_numpy(search.values.view(np.float32)),
        torch.tensor(bool(search.broken.any())),
        torch.from_numpy(hints),
    )


@serial
def _settle(residual, momentum, masks, indices, heard):
    for i in range(indices.size):
        j = indices[i]
        residual[j] = residual[j] - heard[i]
        if masks:
            momentum[j] = np.float32(0.0)


@in_turn
def settle_(residual: Tensor, momentum: Tensor | None, indices: Tensor, heard: Tensor) -> None:
    v = residual.numpy()
    _settle(v, v if momentum is None else momentum.numpy(), momentum is not None, indices.numpy(), heard.numpy())
