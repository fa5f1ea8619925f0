"""Tally: what messages would cost that are never written.

An ask whose tensors have a shape but no content goes through the same fusing as any other, and the collectives that
come of it are counted instead of carried out.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from gradwire.core.asks import Ask, Gather, Sum, Swap
from gradwire.core.payload import Payload
from gradwire.links.collectives import AllReduce, Traffic, traffic
from gradwire.sync.complaint import rider
from gradwire.sync.lockstep import asked_of

META = torch.device("meta")


def blank(n: int) -> Payload:
    """A message of which only the length matters."""
    return Payload(torch.empty(n, dtype=torch.uint8, device=META))


class Agreed(Gather):
    """A gather whose length the group had to agree on; ``size`` is what it agreed on."""


def two_rounds(sizes: Sequence[int]) -> list[list[Ask]]:
    """What every rank says in the two legs of `two_way`, by leg and rank, given the sizes of all shards' messages."""
    world = len(sizes)
    out = {rank: blank(n) for rank, n in enumerate(sizes)}
    swaps: list[Ask] = [Swap(out, dict.fromkeys(range(world), n)) for n in sizes]
    return [swaps, [Gather(blank(n), max(sizes)) for n in sizes]]


def cost(asks: Sequence[Ask], rank: int, world: int, first: bool) -> Traffic:
    """What a round of one rank costs it; with the first one of a launch, a complaint rides along."""
    said = [*asks, rider(0, (), asks[0], world, META)] if first else asks
    return _cost(tuple(map(_Shape.of, said)), rank, world)


class _Shape(NamedTuple):
    """An ask as far as it costs anything; equal shapes cost the same."""

    kind: str
    numbers: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, ask: Ask) -> "_Shape":
        if isinstance(ask, Swap):
            out = tuple(payload.nbytes for _, payload in sorted(ask.out.items()))
            return cls("swap", (*out, *(n for _, n in sorted(ask.into.items()))), torch.uint8)
        if isinstance(ask, Gather):
            assert ask.size is not None
            return cls("agreed" if isinstance(ask, Agreed) else "gather", (ask.size,), torch.uint8)
        return cls("sum", (ask.tensor.numel(),), ask.tensor.dtype)

    def ask(self) -> Ask:
        if self.kind == "sum":
            return Sum(torch.empty(self.numbers[0], dtype=self.dtype, device=META))
        if self.kind == "swap":
            half = len(self.numbers) // 2
            out = {rank: blank(n) for rank, n in enumerate(self.numbers[:half])}
            return Swap(out, dict(enumerate(self.numbers[half:])))
        return Gather(blank(self.numbers[0]), self.numbers[0])


@lru_cache(maxsize=1024)
def _cost(shapes: tuple[_Shape, ...], rank: int, world: int) -> Traffic:
    total = Traffic()
    agreed = sum(shape.kind == "agreed" for shape in shapes)
    if agreed:
        total += traffic(AllReduce(torch.empty(agreed, dtype=torch.int64, device=META), "max"), rank, world)
    for collective in asked_of([shape.ask() for shape in shapes], world):
        total += traffic(collective, rank, world)
    return total
