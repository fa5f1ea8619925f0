"""The mean of sparse messages: zeros by all threads, then the few numbers in rank order."""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from gradwire.core.layout import Flat
from gradwire.kernels.cpu.buffer_pool import pooled_empty
from gradwire.kernels.cpu.places import leave, places, stretch
from gradwire.kernels.cpu.threads import compiled, in_turn, serial

_TILE = 1 << 16
_LINES = 1 << 12  # what stays in the first cache while zeros, numbers and means are written
_STRETCH = 1 << 20  # what a thread takes at once


@compiled
def _clear(out):
    n = out.size
    for t in prange((n + _TILE - 1) // _TILE):
        out[t * _TILE : (t + 1) * _TILE] = np.float32(0.0)


@serial
def _add(values, indices, world, out):
    for i in range(indices.size):
        out[indices[i]] += values[i]
    divided = np.zeros((out.size + 63) // 64, dtype=np.uint64)  # places that are not to be divided again
    for i in range(indices.size):
        j = indices[i]
        bit = np.uint64(1) << np.uint64(j & 63)
        if not divided[j >> 6] & bit:
            divided[j >> 6] |= bit
            out[j] /= np.float32(world)


@in_turn
def scatter_mean(values: Tensor, indices: Tensor, bounds: tuple[int, ...], n: int, world: int) -> Tensor:
    out = pooled_empty(n, np.float32)
    _clear(out)
    stretch = slice(bounds[0], bounds[-1])
    _add(values[stretch].numpy(), indices[stretch].numpy(), world, out)
    return torch.from_numpy(out)


@compiled
def _write(values, indices, bounds, world, out):
    """The same, of messages whose positions rise, into what is there: memory is touched once."""
    n, ranks = out.starts[-1], bounds.size - 1
    for s in prange((n + _STRETCH - 1) // _STRETCH):
        begin, end = s * _STRETCH, min(n, (s + 1) * _STRETCH)
        at, stop = np.empty(ranks, dtype=np.int64), np.empty(ranks, dtype=np.int64)
        for r in range(ranks):
            at[r] = bounds[r] + np.searchsorted(indices[bounds[r] : bounds[r + 1]], begin)
        divided = np.empty(_LINES // 64, dtype=np.uint64)  # places that are not to be divided again
        for a in range(begin, end, _LINES):
            b = min(end, a + _LINES)
            piece = stretch(out, a, b)
            piece[:] = np.float32(0.0)
            divided[:] = np.uint64(0)
            for r in range(ranks):
                i = at[r]
                while i < bounds[r + 1] and indices[i] < b:
                    piece[indices[i] - a] += values[i]
                    i += 1
                stop[r] = i
            for r in range(ranks):
                for i in range(at[r], stop[r]):
                    j = indices[i] - a
                    bit = np.uint64(1) << np.uint64(j & 63)
                    if not divided[j >> 6] & bit:
                        divided[j >> 6] |= bit
                        piece[j] /= np.float32(world)
                at[r] = stop[r]
            leave(out, a, b, piece)


@in_turn
def scatter_mean_(out: Flat, values: Tensor, indices: Tensor, bounds: tuple[int, ...], world: int) -> None:
    _write(values.numpy(), indices.numpy(), np.array(bounds), world, places(out))
