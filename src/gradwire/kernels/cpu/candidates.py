"""Candidates of a selection: collected from a loose edge up, then chosen among exactly.

Magnitudes are compared as the integers that their bits are, which is the same order.
"""

import numpy as np

from gradwire.kernels.cpu.threads import serial
from gradwire.kernels.cpu.vectors import first_set, from_edge, number_set, reserve

MAGNITUDE = np.int32(0x7FFFFFFF)
SMALLEST = np.int32(1 << 23)  # normal magnitude: an edge below would let all zeros of a sparse gradient pass
_SAMPLE = 1 << 14  # values that a guess is made of
_STRIDE = 1 << 21  # the bits of a magnitude, less this: about 16 % below it
_LINE = 16  # neighbors that come into the cache together


@serial
def collect(bits, edge, taken, places, found):
    """Put a tile's places and bits where there is room for all of them. Returns where that is, and how many."""
    masks = np.empty((bits.size + 63) // 64, dtype=np.uint64)
    whole = bits.size // 64
    for i in range(whole):
        masks[i] = from_edge(bits, 64 * i, edge)
    if whole < masks.size:
        last = np.uint64(0)
        for j in range(64 * whole, bits.size):
            last |= np.uint64(bits[j] & MAGNITUDE >= edge) << np.uint64(j & 63)
        masks[whole] = last
    count = 0
    for i in range(masks.size):
        count += number_set(masks[i])
    if count == 0:
        return 0, 0
    first = reserve(taken, count)
    if first + count <= places.size:
        _write(bits, masks, places[first : first + count], found[first : first + count])
    return first, count


@serial
def _write(bits, masks, places, found):
    at = 0
    for i in range(masks.size):
        passed = masks[i]
        while passed:
            j = 64 * i + first_set(passed)
            passed &= passed - np.uint64(1)
            places[at] = j
            found[at] = bits[j]
            at += 1


@serial
def kth(bits, k):
    """The k-th largest magnitude, k >= 1, digit by digit: 11, 11 and 9 bits."""
    edge, left = np.int32(0), k
    for low, width in ((20, 11), (9, 11), (0, 9)):
        counts = np.zeros(1 << width, dtype=np.int64)
        for i in range(bits.size):
            size = bits[i] & MAGNITUDE
            # What differs in a higher digit is settled already.
            counts[(size >> low) & ((1 << width) - 1)] += np.int64(size >> (low + width) == edge >> (low + width))
        digit = (1 << width) - 1
        while counts[digit] < left:
            left -= counts[digit]
            digit -= 1
        edge |= np.int32(digit << low)
    return edge


@serial
def guess(bits, k):
    """An edge that about k to 2k magnitudes reach, from a sample."""
    n = bits.size
    if n <= _SAMPLE:
        return kth(bits, k)
    lines = _SAMPLE // _LINE
    apart = n // lines
    sample = np.empty((lines, _LINE), dtype=np.int32)
    for i in range(lines):
        for j in range(_LINE):
            sample[i, j] = bits[i * apart + j]
    fair = k * _SAMPLE / n
    return kth(sample.reshape(sample.size), min(_SAMPLE, int(fair + 4 * np.sqrt(fair)) + 4))


@serial
def choose(start, first, counts, places, found, k, wanted, indices, values):
    """The k largest of a segment, in rising order; of equals the first. Returns an edge for the next time.

    Tile t begins at ``start[t]`` and holds ``counts[t]`` candidates from ``first[t]`` on. About ``wanted`` would reach
    the edge that is returned, if they were the same the next time.
    """
    together = np.empty(counts.sum(), dtype=np.int32)
    at = 0
    for t in range(counts.size):
        together[at : at + counts[t]] = found[first[t] : first[t] + counts[t]]
        at += counts[t]
    edge = kth(together, k)
    ties = k
    for i in range(together.size):
        ties -= np.int64(together[i] & MAGNITUDE > edge)
    at = 0
    for t in range(counts.size):
        for i in range(first[t], first[t] + counts[t]):
            size = found[i] & MAGNITUDE
            if size > edge or (size == edge and ties > 0):
                ties -= np.int64(size == edge)
                indices[at] = start[t] + places[i]
                values[at] = found[i]
                at += 1
    return _next_edge(together, k, edge, wanted)


@serial
def _next_edge(candidates, k, edge, wanted):
    """What ``wanted`` candidates would reach; if there are fewer, as far below the lowest as their density suggests."""
    count = candidates.size
    low = np.int64(kth(candidates, min(count, wanted)))
    if count < wanted:
        low -= min((edge - low) * (wanted - count) // max(count - k, 1) + 1, _STRIDE)
    return np.int32(max(low, SMALLEST))
