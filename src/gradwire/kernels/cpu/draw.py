"""Random distinct numbers: each unit's Feistel network, walked number by number. See `gradwire.kernels.select`."""

from functools import lru_cache

import numpy as np
import torch
from numba import prange
from numpy.typing import NDArray
from torch import Tensor

from gradwire.core.keys import Key
from gradwire.kernels.cpu.pieces import Pieces, whole
from gradwire.kernels.cpu.random import block, streams
from gradwire.kernels.cpu.threads import compiled, in_turn, serial
from gradwire.kernels.select import HEAD, ROUNDS, sides_of, words_of

_CHUNK = 4096


@serial
def _words(out, step, k0, k1):
    rows = out.reshape(out.size // 4, 4)
    for i in range(rows.shape[0]):
        rows[i, 0], rows[i, 1], rows[i, 2], rows[i, 3] = block(np.uint64(i), step, k0, k1)


@serial
def _walk(x, n, a, b, words):
    """Permute, and again, until below n."""
    y = x
    while True:
        left, right = y // b, y % b
        at = HEAD
        for turn in range(ROUNDS):
            # The sum of two numbers below a side is below twice that side.
            if turn % 2 == 0:
                left += np.int64(words[at + right]) * a >> 32
                left -= a if left >= a else 0
            else:
                right += np.int64(words[at + left]) * b >> 32
                right -= b if right >= b else 0
            at += a
        y = left * b + right
        if y < n:
            return y


@compiled
def _write_words(starts, keys, step, words):
    for s in prange(keys.shape[0]):
        _words(words[starts[s] : starts[s + 1]], step, keys[s, 0], keys[s, 1])


@compiled
def _draw(table, starts, words, pieces, out):
    for t in prange(pieces.start.size):
        s = pieces.segment[t]
        n, a, b = table[s]
        own = words[starts[s] : starts[s + 1]]
        rotation = ((np.int64(own[0]) << 31) ^ np.int64(own[1])) % n
        drawn = out[pieces.start[t] : pieces.stop[t]]
        for i in range(drawn.size):
            y = _walk(pieces.offset[t] + i, n, a, b, own) + rotation
            drawn[i] = y - n if y >= n else y


@lru_cache(maxsize=64)
def _networks(lengths: tuple[int, ...], counts: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.int64], Pieces]:
    """Each unit's n and sides, where its words begin, and the numbers to draw in pieces of work."""
    sides = [sides_of(n) for n in lengths]
    table = np.array([(n, a, b) for n, (a, b) in zip(lengths, sides, strict=True)], dtype=np.int64).reshape(-1, 3)
    starts = np.cumsum([0, *(-(-words_of(a) // 4) * 4 for a, _ in sides)], dtype=np.int64)
    return table, starts, whole(counts, _CHUNK)


@in_turn
def permute(
    sizes: Tensor, names: tuple[str, ...], key: Key, lengths: tuple[int, ...], counts: tuple[int, ...]
) -> Tensor:
    del sizes
    table, starts, pieces = _networks(lengths, counts)
    words, out = np.empty(starts[-1], dtype=np.uint32), np.empty(sum(counts), dtype=np.int64)
    _write_words(starts, streams(key, names), np.uint64(key.step), words)
    _draw(table, starts, words, pieces, out)
    return torch.from_numpy(out)
