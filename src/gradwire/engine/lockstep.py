"""Lockstep: N ranks in one process, by the same code, for tests, notebooks and one-GPU studies.

Each rank's generator is stepped in turn; their collectives are carried out on lists of tensors. Gathers equal those of
real processes bit for bit; sums are added in rank order, so they equal a ring's to rounding. Where ranks share hosts, a
group is answered as soon as all of its ranks have requested something of it.
"""

from collections.abc import Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from gradwire.comm.collectives import AllGatherOp, AllReduceOp, AllToAllOp, Collective, Traffic, fuse, traffic
from gradwire.comm.host_layout import HostLayout
from gradwire.core import Request
from gradwire.core.decode_cache import cached
from gradwire.core.requests import Finished, advance, run
from gradwire.engine.drive import RoundGenerator, T, interleave


class Lockstep:
    """A group of ranks that live in this process.

    Attributes:
        world: Number of ranks.
        host_layout: Which of them share a host, if that makes a difference.
        traffic: By rank: bytes sent and received; with hosts, those between hosts.
        inside: By rank: bytes inside its host.
    """

    def __init__(self, world: int, host_layout: HostLayout | None = None) -> None:
        self.world, self.host_layout = world, host_layout
        self.traffic = [Traffic() for _ in range(world)]
        self.inside = [Traffic() for _ in range(world)]

    def drive(self, generators: Sequence[RoundGenerator[T]]) -> list[T]:
        """Run the same protocol on all ranks."""
        with cached():
            steps = [advance(generator) for generator in generators]
            while rounds := {rank: step for rank, step in enumerate(steps) if not isinstance(step, Finished)}:
                complete = list(self._complete(rounds))
                assert complete, "ranks wait for each other"
                for group in complete:
                    answers = self._answer(group, [rounds[rank] for rank in group])
                    for rank, answer in zip(group, answers, strict=True):
                        steps[rank] = advance(generators[rank], answer)
            return [step.value for step in steps if isinstance(step, Finished)]

    def _complete(self, rounds: dict[int, list[Request]]) -> Iterator[tuple[int, ...]]:
        """Groups all of whose ranks have requested something of each other."""
        for rank, requests in rounds.items():
            scope = requests[0].scope
            group = self._group(rank, scope)
            if rank == group[0] and all(peer in rounds and rounds[peer][0].scope == scope for peer in group):
                yield group

    def _group(self, rank: int, scope: str) -> tuple[int, ...]:
        if scope == "world" or self.host_layout is None:
            return tuple(range(self.world))
        return self.host_layout.local_ranks(rank) if scope == "host" else self.host_layout.counterparts(rank)

    def _answer(self, group: tuple[int, ...], rounds: Sequence[list[Request]]) -> list[list[Any]]:
        """Answer one round of a group's ranks."""
        account = self.inside if rounds[0][0].scope == "host" else self.traffic

        def serve(collectives: list[Collective]) -> list[Tensor]:
            for place, (rank, collective) in enumerate(zip(group, collectives, strict=True)):
                account[rank] += traffic(collective, place, len(group))
            return move(collectives)

        return run(interleave([fuse(requests, len(group)) for requests in rounds]), serve)


def move(collectives: Sequence[Collective]) -> list[Tensor]:
    """Carry out one collective of all ranks."""
    tensors = [collective.tensor for collective in collectives]
    first = collectives[0]
    if isinstance(first, AllReduceOp):
        op = torch.add if first.op == "sum" else torch.maximum
        return [reduce(op, tensors[1:], tensors[0].clone())] * len(collectives)
    if isinstance(first, AllGatherOp):
        return [torch.stack(tensors)] * len(collectives)
    if isinstance(first, AllToAllOp):
        rows = [x.split(list(c.out)) for x, c in zip(tensors, collectives, strict=True) if isinstance(c, AllToAllOp)]
        return [torch.cat([row[rank] for row in rows]) for rank in range(len(collectives))]
    return [tensors[0]] * len(collectives)  # a broadcast
