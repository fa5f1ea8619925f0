"""Philox4x32-10 in registers, the bits of `gradwire.kernels.philox`."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from gradwire.core.keys import Key
from gradwire.kernels.cpu.threads import inlined, serial

_M0, _M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_W0, _W1 = np.uint32(0x9E3779B9), np.uint32(0xBB67AE85)
_HIGH = np.uint64(32)


@inlined
def block(index, step, k0, k1):
    """The four words of one counter."""
    c0, c1 = np.uint32(index & np.uint64(0xFFFFFFFF)), np.uint32(index >> _HIGH)
    c2, c3 = np.uint32(step & np.uint64(0xFFFFFFFF)), np.uint32(step >> _HIGH)
    for _ in range(10):
        p0, p1 = np.uint64(c0) * _M0, np.uint64(c2) * _M1
        c0, c1, c2, c3 = (
            np.uint32(p1 >> _HIGH) ^ c1 ^ k0,
            np.uint32(p1),
            np.uint32(p0 >> _HIGH) ^ c3 ^ k1,
            np.uint32(p0),
        )
        k0, k1 = np.uint32(k0 + _W0), np.uint32(k1 + _W1)
    return c0, c1, c2, c3


@inlined
def unit(word):
    """A word as a float32 in [0, 1)."""
    return np.float32(word >> np.uint32(8)) * np.float32(2.0**-24)


@serial
def uniform(first, count, step, k0, k1):
    """Uniform numbers of the elements from ``first`` on of a stream."""
    base = first // 4
    drawn = np.empty(((first + count + 3) // 4 - base, 4), dtype=np.float32)
    for b in range(drawn.shape[0]):
        w0, w1, w2, w3 = block(np.uint64(base + b), step, k0, k1)
        drawn[b, 0] = unit(w0)
        drawn[b, 1] = unit(w1)
        drawn[b, 2] = unit(w2)
        drawn[b, 3] = unit(w3)
    return drawn.reshape(drawn.size)[first % 4 : first % 4 + count]


def streams(key: Key, names: tuple[str, ...]) -> NDArray[np.uint32]:
    """The Philox keys of all segments. [segments, 2]."""
    return _table(tuple(map(key.words, names)))


@lru_cache(maxsize=64)
def _table(words: tuple[tuple[int, int], ...]) -> NDArray[np.uint32]:
    return np.array(words, dtype=np.uint32).reshape(-1, 2)
