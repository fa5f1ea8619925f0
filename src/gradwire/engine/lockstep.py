"""Lockstep: N ranks in one process, by the same code, for tests, notebooks and one-GPU studies.

Each rank's generator is stepped in turn; their collectives are carried out on lists of tensors. Gathers equal those of
real processes bit for bit; sums are added in rank order, so they equal a ring's to rounding. Where ranks share hosts, a
group is answered as soon as all of its ranks have requested something of it.
"""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from gradwire.comm.collectives import (
    AllGatherOp,
    AllReduceOp,
    AllToAllOp,
    BroadcastOp,
    Collective,
    Traffic,
    fuse,
    traffic,
)
from gradwire.comm.host_layout import HostLayout
from gradwire.core.decode_cache import cached
from gradwire.core.requests import Finished, Request, advance, run
from gradwire.engine.drive import Rounds

T = TypeVar("T")


class Lockstep:
    """A group of ranks that live in this process.

    Attributes:
        world: Number of ranks.
        grouping: Which of them share a host, if that makes a difference.
        traffic: By rank: bytes sent and received; with hosts, those between hosts.
        inside: By rank: bytes inside its host.
    """

    def __init__(self, world: int, grouping: HostLayout | None = None) -> None:
        self.world, self.grouping = world, grouping
        self.traffic = [Traffic() for _ in range(world)]
        self.inside = [Traffic() for _ in range(world)]

    def drive(self, generators: Sequence[Rounds[T]]) -> list[T]:
        """Run the same protocol on all ranks."""
        with cached():
            results: dict[int, T] = {}
            pending = {rank: advance(generator) for rank, generator in enumerate(generators)}
            while pending:
                for rank, step in list(pending.items()):
                    if isinstance(step, Finished):
                        results[rank] = step.value
                        del pending[rank]
                rounds = {rank: step for rank, step in pending.items() if not isinstance(step, Finished)}
                complete = list(self._complete(rounds))
                assert complete or not rounds, "ranks wait for each other"
                for group in complete:
                    answers = self._answer(group, [rounds[rank] for rank in group])
                    pending |= {r: advance(generators[r], x) for r, x in zip(group, answers, strict=True)}
            return [results[rank] for rank in range(self.world)]

    def echo(self, requests: Sequence[Request]) -> list[Any]:
        """Answer requests as if every rank had made the same. Nothing is counted."""
        return run(fuse(requests, self.world), lambda collective: move([collective] * self.world)[0])

    def _complete(self, rounds: dict[int, list[Request]]) -> Iterator[tuple[int, ...]]:
        """Groups all of whose ranks have requested something of each other."""
        for rank, requests in rounds.items():
            scope = requests[0].scope
            group = self._group(rank, scope)
            if rank == group[0] and all(mate in rounds and rounds[mate][0].scope == scope for mate in group):
                yield group

    def _group(self, rank: int, scope: str) -> tuple[int, ...]:
        if scope == "world" or self.grouping is None:
            return tuple(range(self.world))
        return self.grouping.mates(rank) if scope == "local" else self.grouping.rail(rank)

    def _answer(self, group: tuple[int, ...], rounds: Sequence[list[Request]]) -> list[list[Any]]:
        """Answer one round of a group's ranks."""
        account = self.inside if rounds[0][0].scope == "local" else self.traffic
        generators = [fuse(requests, len(group)) for requests in rounds]
        steps = [advance(generator) for generator in generators]
        while True:
            collectives = [step for step in steps if not isinstance(step, Finished)]
            if not collectives:
                return [step.value for step in steps if isinstance(step, Finished)]
            for place, (rank, collective) in enumerate(zip(group, collectives, strict=True)):
                account[rank] += traffic(collective, place, len(group))
            steps = [advance(generator, x) for generator, x in zip(generators, move(collectives), strict=True)]


def collectives_of(requests: Sequence[Request], world: int) -> list[Collective]:
    """The collectives that these requests take; their tensors need no content, only a shape."""
    found: list[Collective] = []

    def pretend(collective: Collective) -> Tensor:
        found.append(collective)
        if isinstance(collective, AllGatherOp):
            return collective.tensor.new_empty(world, collective.tensor.numel())
        if isinstance(collective, AllToAllOp):
            return collective.tensor.new_empty(sum(collective.into))
        return collective.tensor

    run(fuse(requests, world), pretend)
    return found


def move(collectives: Sequence[Collective]) -> list[Tensor]:
    """Carry out one collective of all ranks."""
    tensors = [collective.tensor for collective in collectives]
    first = collectives[0]
    if isinstance(first, AllReduceOp):
        total = tensors[0].clone()
        for x in tensors[1:]:
            total = total + x if first.op == "sum" else torch.maximum(total, x)
        return [total] * len(collectives)
    if isinstance(first, AllGatherOp):
        return [torch.stack(tensors)] * len(collectives)
    if isinstance(first, BroadcastOp):
        return [tensors[0]] * len(collectives)
    rows = [x.split(list(c.out)) for x, c in zip(tensors, collectives, strict=True) if isinstance(c, AllToAllOp)]
    return [torch.cat([row[rank] for row in rows]) for rank in range(len(collectives))]
