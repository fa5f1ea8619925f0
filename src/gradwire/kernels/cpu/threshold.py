"""Selection by a known key: whatever is larger, and the first of those that tie with it.

Candidates are not needed for that, so it serves segments of which many are selected, or in which very many are equal,
and those whose candidates were too few or too many. All threads share every segment.
"""

from typing import NamedTuple

import numpy as np
from numba import prange
from numpy.typing import NDArray

from gradwire.kernels.cpu.candidates import MAGNITUDE, number, reaching
from gradwire.kernels.cpu.threads import compiled, serial
from gradwire.kernels.cpu.vectors import first_set

_DIGITS = ((20, 11), (9, 11), (0, 9))  # bits below a digit, and its own
_PARTS = 8  # of a segment, whose digits are counted side by side


class Work(NamedTuple):
    """Tiles, the segments that they lie in, and how many to select."""

    start: NDArray[np.int64]  # of tiles, each inside one segment
    stop: NDArray[np.int64]
    segment: NDArray[np.int64]
    offsets: NDArray[np.int64]  # of segments, and one past the last
    first: NDArray[np.int64]  # tile of each segment, and one past the last
    ks: NDArray[np.int64]
    ends: NDArray[np.int64]  # where each segment's choice begins, and one past the last
    dense: NDArray[np.bool_]  # segments of which many are selected
    room: NDArray[np.int64]  # where each segment's candidates begin, and one past the last


@serial
def _both(bits, key):
    """Masks of the keys that are larger, and of those that tie."""
    larger, tied = np.zeros((bits.size + 63) // 64, dtype=np.uint64), np.empty((bits.size + 63) // 64, dtype=np.uint64)
    if key < MAGNITUDE:
        reaching(bits, np.int32(key + 1), larger)
    reaching(bits, key, tied)
    for i in range(tied.size):
        tied[i] &= ~larger[i]
    return larger, tied


@compiled
def _count(x, work, chosen, keys, larger, tied):
    for t in prange(work.start.size):
        s = work.segment[t]
        if chosen[s]:
            up, even = _both(x[work.start[t] : work.stop[t]].view(np.int32), keys[s])
            larger[t], tied[t] = number(up), number(even)


@compiled
def _share_out(work, chosen, larger, tied, to):
    """Where each tile's winners go, and, in place of how many tie there, how many of those win.

    Returns for which segments the key is right.
    """
    right = np.ones(chosen.size, dtype=np.bool_)
    for s in prange(chosen.size):
        if chosen[s]:
            a, b = work.first[s], work.first[s + 1]
            left = work.ks[s] - larger[a:b].sum()
            right[s] = 0 < left <= tied[a:b].sum()
            at = work.ends[s]
            if right[s]:
                for t in range(a, b):
                    tied[t] = min(tied[t], left)
                    left -= tied[t]
                    to[t] = at
                    at += larger[t] + tied[t]
    return right


@compiled
def _write(x, work, chosen, keys, tied, to, indices, values):
    for t in prange(work.start.size):
        s = work.segment[t]
        if chosen[s]:
            bits = x[work.start[t] : work.stop[t]].view(np.int32)
            larger, even = _both(bits, keys[s])
            at, left = to[t], tied[t]
            for i in range(larger.size):
                passed = larger[i] | even[i] if left > 0 else larger[i]
                while passed:
                    j = first_set(passed)
                    passed &= passed - np.uint64(1)
                    tie = np.int64(even[i] >> np.uint64(j) & np.uint64(1))
                    if tie <= left:
                        left -= tie
                        indices[at], values[at] = work.start[t] + 64 * i + j, bits[64 * i + j]
                        at += 1


@compiled
def _count_digits(x, low, width, known):
    """How many of the keys that begin with what is known have each next digit, by parts of the segment."""
    rows = np.zeros((_PARTS, 1 << width), dtype=np.int64)
    each = (x.size + _PARTS - 1) // _PARTS
    for r in prange(_PARTS):
        bits = x[r * each : (r + 1) * each].view(np.int32)
        for j in range(bits.size):
            size = bits[j] & MAGNITUDE
            rows[r, (size >> low) & ((1 << width) - 1)] += np.int64(size >> (low + width) == known)
    return rows


def _exact(x: NDArray[np.float32], k: int) -> int:
    """The k-th largest key of a segment, whatever it holds."""
    known, left = 0, k
    for low, width in _DIGITS:
        at_least = _count_digits(x, low, width, known).sum(0)[::-1].cumsum()[::-1]
        digit = int(np.nonzero(at_least >= left)[0][-1])
        left -= int(at_least[digit + 1]) if digit + 1 < at_least.size else 0
        known = known << width | digit
    return known


def select_by_key(
    x: NDArray[np.float32],
    work: Work,
    chosen: NDArray[np.bool_],
    keys: NDArray[np.int32],
    indices: NDArray[np.int64],
    values: NDArray[np.int32],
) -> None:
    """Select in the chosen segments, given what should be the k-th largest key; where it is not, it is found."""
    larger, tied, to = (np.zeros(work.start.size, dtype=np.int64) for _ in range(3))
    _count(x, work, chosen, keys, larger, tied)
    right = _share_out(work, chosen, larger, tied, to)
    wrong = chosen & ~right
    for s in np.nonzero(wrong)[0]:
        keys[s] = _exact(x[work.offsets[s] : work.offsets[s + 1]], int(work.ks[s]))
    if wrong.any():
        _count(x, work, wrong, keys, larger, tied)
        _share_out(work, wrong, larger, tied, to)
    _write(x, work, chosen, keys, tied, to, indices, values)
