"""One number per group: sums in float64, in pieces that do not depend on the number of threads."""

import numpy as np
from numba import njit, prange
from numpy.typing import NDArray

TOTAL, SQUARES, LARGEST, ABOVE, BELOW = range(5)
_PIECE = 1 << 15

# Sums may be reordered: they are in float64, and end as one float32.
_summing = njit(cache=True, nogil=True, parallel=True, error_model="numpy", fastmath={"reassoc", "nsz"})


@_summing
def _pieces(x, starts, stops, what, out, seen):
    for i in prange(starts.size):
        piece = x[starts[i] : stops[i]]
        total = 0.0
        count = 0
        if what == TOTAL:
            for j in range(piece.size):
                total += np.float64(abs(piece[j]))
        elif what == SQUARES:
            for j in range(piece.size):
                total += np.float64(piece[j]) * np.float64(piece[j])
        elif what == LARGEST:
            # As integers, magnitudes keep their order, and NaN comes last: a broken value stays visible.
            bits = piece.view(np.int32)
            top = np.int32(0)
            for j in range(bits.size):
                top = max(top, bits[j] & np.int32(0x7FFFFFFF))
            count += np.int64(top)
        else:
            for j in range(piece.size):
                if (piece[j] >= 0.0) == (what == ABOVE):
                    total += np.float64(piece[j])
                    count += 1
        out[i] = total
        seen[i] = count


def cut(lengths: NDArray[np.int64], block: int | None) -> NDArray[np.int64]:
    """Group lengths: segments, or blocks of segments."""
    if block is None:
        return lengths
    counts = -(-lengths // block)
    sizes = np.full(int(counts.sum()), block, dtype=np.int64)
    used = counts > 0
    sizes[counts.cumsum()[used] - 1] = lengths[used] - (counts[used] - 1) * block
    return sizes


def _reduce(
    x: NDArray[np.float32], groups: NDArray[np.int64], what: int
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    ends = groups.cumsum()
    pieces = np.maximum(1, -(-groups // _PIECE))
    first = pieces.cumsum() - pieces
    owner = np.repeat(np.arange(groups.size), pieces)
    starts = (ends - groups)[owner] + (np.arange(owner.size) - first[owner]) * _PIECE
    stops = np.minimum(starts + _PIECE, ends[owner])
    out, seen = np.empty(owner.size), np.empty(owner.size, dtype=np.int64)
    _pieces(x, starts, stops, what, out, seen)
    if owner.size == groups.size:
        return out, seen
    return np.add.reduceat(out, first), (np.maximum if what == LARGEST else np.add).reduceat(seen, first)


def total(x: NDArray[np.float32], groups: NDArray[np.int64], what: int) -> NDArray[np.float64]:
    """Each group's sum of magnitudes, or of squares."""
    return _reduce(x, groups, what)[0]


def largest(x: NDArray[np.float32], groups: NDArray[np.int64]) -> NDArray[np.float32]:
    """Each group's largest magnitude."""
    return _reduce(x, groups, LARGEST)[1].astype(np.int32).view(np.float32)


def mean_of(x: NDArray[np.float32], groups: NDArray[np.int64], what: int) -> NDArray[np.float32]:
    """The mean of each group's values on one side of zero."""
    out, seen = _reduce(x, groups, what)
    return (out / np.maximum(seen, 1)).astype(np.float32)
