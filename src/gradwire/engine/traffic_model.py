"""Traffic model: what messages cost that are never written.

A request whose tensors have a shape but no content is fused like any other, and the resulting collectives are counted
instead of carried out.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

from gradwire.comm.collectives import AllReduceOp, Traffic, traffic
from gradwire.core.requests import Gather, Request, SendRecv, Sum
from gradwire.engine.lockstep import collectives_of
from gradwire.engine.status import request_for
from gradwire.exchanges.batch import META, blank


class AgreedGather(Gather):
    """A gather whose length the group had to agree on; ``size`` is what it agreed on."""


def costs(rounds: Sequence[Sequence[Request]], world: int, first: bool) -> list[Traffic]:
    """What a round costs each rank, given what each lane's ranks ask; a complaint rides along with a launch's first."""
    told = _every_rank([[lane[rank] for lane in rounds] for rank in range(world)])
    riders = (
        [_Shape.of(request_for(torch.empty(1, dtype=torch.uint8, device=META), rounds[0][0], world))] if first else []
    )
    return [_cost((*shapes, *riders), rank, world) for rank, shapes in enumerate(told)]


def _every_rank(asks: Sequence[Sequence[Request]]) -> list[tuple["_Shape", ...]]:
    """The shapes of what ranks ask. Sums and gathers have the same on all."""
    if any(isinstance(ask, SendRecv) for ask in asks[0]):
        return [tuple(map(_Shape.of, own)) for own in asks]
    return [tuple(map(_Shape.of, asks[0]))] * len(asks)


class _Shape(NamedTuple):
    """An ask as far as it costs anything; equal shapes cost the same."""

    kind: str
    numbers: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, ask: Request) -> "_Shape":
        if isinstance(ask, SendRecv):
            out = tuple(payload.nbytes for _, payload in sorted(ask.out.items()))
            return cls("swap", (*out, *(n for _, n in sorted(ask.into.items()))), torch.uint8)
        if isinstance(ask, Gather):
            assert ask.size is not None
            return cls("agreed" if isinstance(ask, AgreedGather) else "gather", (ask.size,), torch.uint8)
        return cls("sum", (ask.tensor.numel(),), ask.tensor.dtype)

    def ask(self) -> Request:
        if self.kind == "sum":
            return Sum(torch.empty(self.numbers[0], dtype=self.dtype, device=META))
        if self.kind == "swap":
            half = len(self.numbers) // 2
            out = {rank: blank(n) for rank, n in enumerate(self.numbers[:half])}
            return SendRecv(out, dict(enumerate(self.numbers[half:])))
        return Gather(blank(self.numbers[0]), self.numbers[0])


def _cost(shapes: tuple[_Shape, ...], rank: int, world: int) -> Traffic:
    swaps = any(shape.kind == "swap" for shape in shapes)
    return _computed(shapes, rank if swaps else 0, world)  # all else costs every rank the same


@lru_cache(maxsize=1024)
def _computed(shapes: tuple[_Shape, ...], rank: int, world: int) -> Traffic:
    total = Traffic()
    agreed = sum(shape.kind == "agreed" for shape in shapes)
    if agreed:
        total += traffic(AllReduceOp(torch.empty(agreed, dtype=torch.int64, device=META), "max"), rank, world)
    for collective in collectives_of([shape.ask() for shape in shapes], world):
        total += traffic(collective, rank, world)
    return total
