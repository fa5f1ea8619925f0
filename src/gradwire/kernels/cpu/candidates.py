"""Candidates of a selection: the entries of a range, collected while they are in cache, then chosen among exactly.

Magnitudes are compared as the integers that their bits are, their keys, which is the same order.
"""

import numpy as np

from gradwire.kernels.cpu.threads import serial
from gradwire.kernels.cpu.vectors import first_set, from_edge, number_set, reserve

MAGNITUDE = np.int32(0x7FFFFFFF)


@serial
def reaching(bits, key, masks):
    """Write which of a tile's keys are at least this one into masks of 64."""
    whole = bits.size // 64
    for i in range(whole):
        masks[i] = from_edge(bits, 64 * i, key)
    if 64 * whole < bits.size:
        last = np.uint64(0)
        for j in range(64 * whole, bits.size):
            last |= np.uint64(bits[j] & MAGNITUDE >= key) << np.uint64(j & 63)
        masks[whole] = last


@serial
def number(masks):
    count = 0
    for i in range(masks.size):
        count += number_set(masks[i])
    return count


@serial
def collect(bits, low, high, taken, places, found):
    """Put a tile's candidates, their places and bits, where there is room for all of them.

    Returns where that is, how many there are, and how many keys lie above the range.
    """
    masks = np.empty((bits.size + 63) // 64, dtype=np.uint64)
    reaching(bits, low, masks)
    over = 0
    if high != MAGNITUDE:
        above = np.empty(masks.size, dtype=np.uint64)
        reaching(bits, high, above)
        over = number(above)
        for i in range(masks.size):
            masks[i] &= ~above[i]
    count = number(masks)
    if count == 0:
        return 0, 0, over
    first = reserve(taken, count)
    if first + count <= places.size:
        _write(bits, masks, places[first : first + count], found[first : first + count])
    return first, count, over


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
    """The k-th largest key, k >= 1, digit by digit: 11, 11 and 9 bits."""
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
def range_of(sample, k, n, dense):
    """From a sample's keys: the range in which the k-th largest of all n should lie, and a guess of it."""
    size = sample.size
    fair = k * size / n
    guess = kth(sample, min(size, max(1, int(fair))))
    if dense:
        doubt = 4 * np.sqrt(fair * (1 - k / n)) + 4  # four standard deviations
        low = kth(sample, int(fair + doubt)) if fair + doubt < size else np.int32(1)
        high = kth(sample, int(fair - doubt)) if fair - doubt >= 1 else MAGNITUDE
    else:
        # Half as many again, four standard deviations, and a few more where hardly any are due.
        low, high = kth(sample, min(size, int(1.5 * fair + 4 * np.sqrt(fair)) + 4)), MAGNITUDE
    return max(low, np.int32(1)), high, guess  # zeros are no candidates: there may be very many


@serial
def gather(first, counts, found):
    """The candidates of several tiles, together."""
    together = np.empty(counts.sum(), dtype=np.int32)
    at = 0
    for t in range(counts.size):
        for i in range(counts[t]):
            together[at + i] = found[first[t] + i]
        at += counts[t]
    return together


@serial
def choose(start, first, counts, places, found, k, indices, values):
    """The k largest of a segment's candidates, in rising order; of equals the first. Returns the k-th largest key.

    Tile t begins at ``start[t]`` and holds ``counts[t]`` candidates from ``first[t]`` on.
    """
    together = gather(first, counts, found)
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
    return edge
