"""Philox4x32-10 in registers, the bits of `gradwire.kernels.philox`."""

import numpy as np
from numpy.typing import NDArray

from gradwire.core.keys import Key
from gradwire.kernels.cpu.threads import inlined

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


def streams(key: Key, names: tuple[str, ...]) -> NDArray[np.uint32]:
    """The Philox keys of all segments. [segments, 2]."""
    return np.array([key.words(name) for name in names], dtype=np.uint32).reshape(-1, 2)
