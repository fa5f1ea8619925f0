"""RankBatch: an exchange of all ranks of one process at once.

The units of all ranks lie in one buffer, rank after rank, each named after its rank. An exchange that declares
`simulate` computes the mean from what ranks would have decoded of each other, without writing a message, and lists the
requests that ranks would have made, so that their bytes are counted.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradwire.codecs import Codec, Decoded, Memory
from gradwire.core import Key, Payload, Request, Segments, by_rank

META = torch.device("meta")


class RankBatch(NamedTuple):
    """The context of a simulated exchange.

    Attributes:
        key: Of all ranks: its rank is `PER_RANK`.
        world: Number of ranks.
        units: Of one rank.
        keeps_error: Whether the lane keeps what is lost, so that a second leg should too.
    """

    key: Key
    world: int
    units: Segments
    keeps_error: bool = True


class Sizes(NamedTuple):
    """How long each rank's message is: bytes known beforehand, and those of its positions, which the device knows."""

    known: list[int]
    positions: Tensor | None  # int64[ranks]


Simulated: TypeAlias = tuple[Tensor, Memory, list[list[Request]] | Sizes]  # mean, memory, requests by round and rank
Simulate: TypeAlias = Callable[[Decoded, Memory, Codec, RankBatch], Simulated]


def blank(n: int) -> Payload:
    """A message of which only the length matters."""
    return Payload(torch.empty(n, dtype=torch.uint8, device=META))


@lru_cache(maxsize=64)
def stacked(units: Segments, world: int, cuts: tuple[tuple[int, int], ...] = ()) -> Segments:
    """The units of all ranks, one rank after the other; cut where an exchange encodes stretches apart."""
    return by_rank([[units.window(*cut) for cut in cuts] or [units]] * world)


def starts_of(codec: Codec, sent: Decoded, table: Segments) -> Sequence[int]:
    """Where the entries of each unit of all ranks begin, and where the last ones end; empty for dense messages."""
    return () if sent.indices is None else (0, *accumulate(codec.counts(sent.indices, table)))


def sizes_of(codec: Codec, sent: Decoded, starts: Sequence[int], batch: RankBatch) -> Sizes:
    """How long each rank's message would be, where that depends on the data."""
    assert sent.indices is not None and codec.indices is not None
    units, n = batch.units, batch.units.total
    known, positions = list[int](), list[Tensor]()
    for rank in range(batch.world):
        mine = starts[rank * len(units) : (rank + 1) * len(units) + 1]
        counts = tuple(stop - start for start, stop in pairwise(mine))
        size, more = codec.length(sent.indices[mine[0] : mine[-1]] - rank * n, counts, units)
        known.append(size)
        positions += [] if more is None else [more]
    return Sizes(known, torch.stack(positions) if positions else None)
