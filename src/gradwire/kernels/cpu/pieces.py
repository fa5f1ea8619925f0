"""How a flat buffer is cut into pieces of work: never across a segment, and small enough for a cache."""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TILE = 2048  # of three vectors, such a tile fits into the first-level cache


class Pieces(NamedTuple):
    """Pieces in memory order; each lies in one segment and holds whole groups, but for a segment's last."""

    start: NDArray[np.int64]
    stop: NDArray[np.int64]
    segment: NDArray[np.int64]  # whose piece it is
    offset: NDArray[np.int64]  # where in its segment it begins
    group: NDArray[np.int64]  # its first group


@lru_cache(maxsize=64)
def whole(lengths: tuple[int, ...], most: int = TILE) -> Pieces:
    """Pieces of at most so many elements. A group is a segment."""
    pieces = _cut(lengths, most)
    return pieces._replace(group=pieces.segment)


@lru_cache(maxsize=64)
def blocked(lengths: tuple[int, ...], block: int) -> Pieces:
    """Pieces that hold whole blocks of their segment. A group is a block."""
    pieces = _cut(lengths, block * max(1, TILE // block))
    n = np.array(lengths, dtype=np.int64)
    groups = -(-n // block)
    return pieces._replace(group=(groups.cumsum() - groups)[pieces.segment] + pieces.offset // block)


def _cut(lengths: tuple[int, ...], most: int) -> Pieces:
    n = np.array(lengths, dtype=np.int64)
    counts = -(-n // most)
    segment = np.repeat(np.arange(n.size), counts)
    offset = (np.arange(segment.size) - (counts.cumsum() - counts)[segment]) * most
    start = (n.cumsum() - n)[segment] + offset
    return Pieces(start, np.minimum(start + most, n.cumsum()[segment]), segment, offset, segment)
