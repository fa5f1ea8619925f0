"""The mean of sparse messages: zeros by all threads, then the few numbers in rank order."""

import numpy as np
import torch
from numba import prange
from torch import Tensor

from gradwire.kernels.cpu.pages import lend
from gradwire.kernels.cpu.threads import compiled, in_turn, serial

_TILE = 1 << 16


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
    out = lend(n, np.float32)
    _clear(out)
    stretch = slice(bounds[0], bounds[-1])
    _add(values[stretch].numpy(), indices[stretch].numpy(), world, out)
    return torch.from_numpy(out)
