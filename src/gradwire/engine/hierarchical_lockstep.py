"""Lockstep of ranks that share hosts: whoever speaks to a group is answered as soon as all of it has spoken."""

from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from gradwire.comm.collectives import Traffic
from gradwire.comm.host_layout import HostLayout
from gradwire.core.requests import Request
from gradwire.engine.drive import Conversation
from gradwire.engine.lockstep import Lockstep

T = TypeVar("T")
Rounds = dict[int, list[Request]]  # by rank: what it has asked and not been told


class HierarchicalLockstep(Lockstep):
    """Hosts of ranks that live in this process.

    Attributes:
        traffic: Between hosts, by rank.
        inside: Within them, by rank.
    """

    def __init__(self, grouping: HostLayout) -> None:
        super().__init__(grouping.world)
        self.grouping = grouping
        self.inside = [Traffic() for _ in range(grouping.world)]

    def _drive(self, conversations: Sequence[Conversation[T]]) -> list[T]:
        results: dict[int, T] = {}
        rounds: Rounds = {}

        def tell(rank: int, answers: Any) -> None:
            try:
                rounds[rank] = conversations[rank].send(answers)
            except StopIteration as done:
                results[rank] = done.value

        for rank in range(self.world):
            tell(rank, None)
        while rounds:
            complete = list(self._complete(rounds))
            assert complete, "ranks wait for each other"
            for group in complete:
                answers = self._answer_group(group, [rounds.pop(rank) for rank in group])
                for rank, answer in zip(group, answers, strict=True):
                    tell(rank, answer)
        return [results[rank] for rank in range(self.world)]

    def _complete(self, rounds: Rounds) -> Iterator[tuple[int, ...]]:
        """Groups all of whose ranks have asked something of each other."""
        for rank, asks in rounds.items():
            scope = asks[0].scope
            group = self._group(rank, scope)
            if rank == group[0] and all(mate in rounds and rounds[mate][0].scope == scope for mate in group):
                yield group

    def _group(self, rank: int, scope: str) -> tuple[int, ...]:
        if scope == "world":
            return tuple(range(self.world))
        return self.grouping.mates(rank) if scope == "local" else self.grouping.rail(rank)

    def _answer_group(self, ranks: Sequence[int], rounds: Sequence[list[Request]]) -> list[list[Any]]:
        group = Lockstep(len(ranks))
        answers = group.answer(rounds)
        account = self.inside if rounds[0][0].scope == "local" else self.traffic
        for rank, traffic in zip(ranks, group.traffic, strict=True):
            account[rank] += traffic
        return answers
