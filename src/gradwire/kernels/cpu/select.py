"""Exact top-k in one pass: a sample says in which range the last winner lies; entries of that range are candidates.

The sample is one of the target, taken before the target is made, and nothing is remembered from step to step: what a
gradient was before does not matter. The range never decides the outcome. A segment of which many are selected, or whose
candidates were too few or too many, is selected from as a whole; see `threshold`.
"""

from functools import lru_cache

import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from gradwire.core.layout import Flat
from gradwire.kernels import fused
from gradwire.kernels.cpu.buffer_pool import pooled_empty
from gradwire.kernels.cpu.candidates import choose, collect, gather, kth, range_of
from gradwire.kernels.cpu.feedback import (
    AS_IT_IS,
    NOWHERE,
    CompiledRule,
    Memories,
    accumulate_tile,
    add_gradient,
    memories,
    rule_of,
)
from gradwire.kernels.cpu.halves import Gradient, gradient, plain, stretch
from gradwire.kernels.cpu.pieces import whole
from gradwire.kernels.cpu.places import carry
from gradwire.kernels.cpu.threads import compiled, in_turn, serial
from gradwire.kernels.cpu.threshold import Work, select_by_key
from gradwire.kernels.fused import Accumulation, PerSegment, Selected

_TILE = 8192  # of five vectors, such a tile fits into the second-level cache
_LINE = 16  # neighbors that come into the cache together
_SMALL = 2048  # entries of a segment that is sampled as a whole
_MANY = 8  # of so many entries one or more: the segment is dense


@lru_cache(maxsize=64)
def _work(lengths: PerSegment, counts: PerSegment) -> Work:
    n = np.array(lengths, dtype=np.int64)
    k = np.minimum(np.array(counts, dtype=np.int64), n)
    tiles = whole(lengths, _TILE)
    first = np.searchsorted(tiles.segment, np.arange(n.size + 1))
    dense = _MANY * k > n
    room = np.minimum(n, np.where(dense, n // 8, 16 * k) + 512)
    return Work(*tiles[:3], _running(n), first, k, _running(k), dense, _running(room))


def _running(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate((np.zeros(1, dtype=np.int64), numbers.cumsum()))


@serial
def _sample(grad, start, residual, momentum, rule):
    """Keys of a target that is not there yet: of a small segment all, else lines of neighbors."""
    n = residual.size
    lines, width = (min(max(_SMALL // _LINE, n // 8192), 1024), _LINE) if n > _SMALL else (1, n)
    keys, unused = np.empty(lines * width, dtype=np.float32), np.empty(width, dtype=np.float32)
    for i in range(lines):
        a = i * n // lines // _LINE * _LINE
        v, u, target = residual[a : a + width], momentum[a : a + width], keys[i * width : (i + 1) * width]
        if rule.kind == AS_IT_IS:
            carry(v, target)
        else:
            add_gradient(stretch(grad, start + a, start + a + width), v, u, target, unused, rule)
    return keys.view(np.int32)


@compiled
def _find_ranges(grad, old, rule, work, low, high, keys):
    residual, momentum = old
    for s in prange(work.ks.size):
        a, b = work.offsets[s], work.offsets[s + 1]
        if work.ks[s]:
            sample = _sample(grad, a, residual[a:b], momentum[a:b], rule)
            low[s], high[s], keys[s] = range_of(sample, work.ks[s], b - a, work.dense[s])


@compiled
def _sweep(
    grad, before, after, rule, work, low, high, taken, places, found, first, counts, over, nonfinite
):  # fmt: skip
    """Accumulate tile by tile, and collect while the tile is still in cache."""
    for t in prange(counts.size):
        a, b, s = work.start[t], work.stop[t], work.segment[t]
        if rule.kind != AS_IT_IS:
            nonfinite[t] = accumulate_tile(grad, a, b, before, after, rule)
        if work.ks[s]:
            mine = slice(work.room[s], work.room[s + 1])
            first[t], counts[t], over[t] = collect(
                after[0][a:b].view(np.int32), low[s], high[s], taken[s : s + 1], places[mine], found[mine]
            )


@compiled
def _choose_all(work, low, places, found, first, counts, over, indices, values, keys, left):
    """Choose in every segment whose candidates suffice and had room; report the others, and which key they may have."""
    for s in prange(keys.size):
        a, b, k = work.first[s], work.first[s + 1], work.ks[s]
        mine = slice(work.room[s], work.room[s + 1])
        total, need = counts[a:b].sum(), k - over[a:b].sum()
        left[s] = k > 0
        if total < need:
            if low[s] == 1:  # zeros win, too
                keys[s] = 0
        elif k and need > 0 and total <= work.room[s + 1] - work.room[s]:
            if work.dense[s]:
                keys[s] = kth(gather(first[a:b], counts[a:b], found[mine]), need)
            else:
                out = slice(work.ends[s], work.ends[s + 1])
                keys[s] = choose(
                    work.start[a:b], first[a:b], counts[a:b], places[mine], found[mine], k, indices[out], values[out]
                )
                left[s] = False


def _select(grad: Gradient, before: Memories, after: Memories, rule: CompiledRule, work: Work) -> Selected:
    tiles, segments, room = work.start.size, work.ks.size, int(work.room[-1])
    low, high, keys = (np.full(segments, 0x7F7FFFFF, dtype=np.int32) for _ in range(3))
    _find_ranges(grad, after if before is NOWHERE else before, rule, work, low, high, keys)
    candidates = pooled_empty(room, np.uint16), pooled_empty(room, np.int32)
    first, counts, over = (np.zeros(tiles, dtype=np.int64) for _ in range(3))
    nonfinite, taken = np.zeros(tiles, dtype=np.bool_), np.zeros(segments, dtype=np.int64)
    _sweep(grad, before, after, rule, work, low, high, taken, *candidates, first, counts, over, nonfinite)
    indices, values = pooled_empty(int(work.ends[-1]), np.int64), pooled_empty(int(work.ends[-1]), np.int32)
    left = np.zeros(segments, dtype=np.bool_)
    _choose_all(work, low, *candidates, first, counts, over, indices, values, keys, left)
    if left.any():
        select_by_key(after[0], work, left, keys, indices, values)
    return Selected(*map(torch.from_numpy, (indices, values.view(np.float32), np.array(nonfinite.any()))))


@in_turn
def topk(x: Tensor, lengths: PerSegment, counts: PerSegment) -> Tensor:
    values = x.detach().float().contiguous().numpy()
    rule = CompiledRule(AS_IT_IS, np.float32(0.0), np.float32(1.0))
    return _select(plain(values), NOWHERE, (values, values), rule, _work(lengths, counts)).indices


@in_turn
def carry_topk_(
    grad: Flat,
    before: fused.Memories,
    after: fused.Memories,
    rule: Accumulation,
    lengths: PerSegment,
    counts: PerSegment,
    subtract: int = 0,
) -> Selected:
    old = NOWHERE if before[0] is after[0] else memories(*before)
    found = _select(gradient(grad), old, memories(*after), rule_of(rule, after[1]), _work(lengths, counts))
    if subtract:
        subtract_sent_(after[0], after[1] if subtract > 1 else None, found.indices, found.values)
    return found


@compiled
def _subtract_sent(residual, momentum, masks, indices, sent):
    for p in prange((indices.size + 65535) // 65536):
        for i in range(65536 * p, min(indices.size, 65536 * (p + 1))):
            j = indices[i]
            residual[j] = residual[j] - sent[i]
            if masks:
                momentum[j] = np.float32(0.0)


@in_turn
def subtract_sent_(residual: Tensor, momentum: Tensor | None, indices: Tensor, sent: Tensor) -> None:
    """As defined, but for positions that all differ."""
    v = residual.numpy()
    _subtract_sent(v, v if momentum is None else momentum.numpy(), momentum is not None, indices.numpy(), sent.numpy())
