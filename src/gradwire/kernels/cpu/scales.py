"""One number per group: sums in float64, in pieces that do not depend on the number of threads."""

import numpy as np
from numba import prange
from numpy.typing import NDArray

from gradwire.kernels.cpu.pieces import whole
from gradwire.kernels.cpu.threads import compiled, serial, summing

MAGNITUDES, SQUARES = range(2)
_PIECE = 1 << 15
_LARGEST = np.finfo(np.float32).max


@summing
def magnitudes(x):
    total = 0.0
    for j in range(x.size):
        total += np.float64(abs(x[j]))
    return total


@summing
def squares(x):
    total = 0.0
    for j in range(x.size):
        total += np.float64(x[j]) * np.float64(x[j])
    return total


@summing
def upper(x):
    """The sum of all that is >= 0."""
    total = 0.0
    for j in range(x.size):
        total += np.float64(x[j] if x[j] >= 0.0 else np.float32(0.0))
    return total


@summing
def lower(x):
    """The sum of the rest, which is where a NaN goes."""
    total = 0.0
    for j in range(x.size):
        total += np.float64(np.float32(0.0) if x[j] >= 0.0 else x[j])
    return total


@serial
def largest(x):
    """The largest magnitude."""
    # As integers, magnitudes keep their order, and NaN comes last: a broken value stays visible.
    bits = x.view(np.int32)
    top = np.int32(0)
    for j in range(bits.size):
        top = max(top, bits[j] & np.int32(0x7FFFFFFF))
    return top


@serial
def norm(x):
    """The l2 norm; infinite only if some value is."""
    root = np.sqrt(squares(x))
    return np.float32(min(root, _LARGEST) if np.isfinite(root) else root)


@compiled
def _reduce(x, pieces, tops, sums):
    for t in prange(sums.size):
        piece = x[pieces.start[t] : pieces.stop[t]]
        tops[t] = largest(piece)
        sums[t] = squares(piece)


def tops_and_squares(
    x: NDArray[np.float32], lengths: tuple[int, ...]
) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Each segment's largest magnitude, and its sum of squares."""
    pieces = whole(lengths, _PIECE)
    tops, sums = np.empty(pieces.start.size, dtype=np.int32), np.empty(pieces.start.size)
    _reduce(x, pieces, tops, sums)
    top = np.zeros(len(lengths), dtype=np.int32)
    np.maximum.at(top, pieces.segment, tops)
    return top.view(np.float32), summed(sums, pieces.segment, len(lengths))


def summed(sums: NDArray[np.float64], segment: NDArray[np.int64], segments: int) -> NDArray[np.float64]:
    """The pieces' sums by segment, added in order."""
    total: NDArray[np.float64] = np.bincount(segment, weights=sums, minlength=segments).astype(np.float64)
    return total


def mean(sums: NDArray[np.float64], lengths: tuple[int, ...], what: int) -> NDArray[np.float32]:
    """The mean magnitude, or the root of the mean square."""
    means: NDArray[np.float64] = sums / np.maximum(np.array(lengths), 1)
    return (np.sqrt(means) if what == SQUARES else means).astype(np.float32)
