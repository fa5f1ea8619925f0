"""Lockstep: N ranks in one process, by the same code, for tests, notebooks and one-GPU studies.

Each rank's conversation is stepped in turn; their collectives are carried out on lists of tensors. Gathers equal those
of real processes bit for bit; sums are added in rank order, so they equal a ring's to rounding.
"""

from collections.abc import Sequence
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
from gradwire.core.decode_cache import sharing
from gradwire.core.requests import Request
from gradwire.engine.drive import Conversation

T = TypeVar("T")


class Lockstep:
    """A group of ranks that live in this process."""

    def __init__(self, world: int) -> None:
        self.world = world
        self.traffic = [Traffic() for _ in range(world)]

    def drive(self, conversations: Sequence[Conversation[T]]) -> list[T]:
        """Hold the same conversation on all ranks."""
        with sharing():
            return self._drive(conversations)

    def _drive(self, conversations: Sequence[Conversation[T]]) -> list[T]:
        answers: list[Any] = [None] * self.world
        while True:
            rounds: list[list[Request]] = []
            results: list[T] = []
            for conversation, answer in zip(conversations, answers, strict=True):
                try:
                    rounds.append(conversation.send(answer))
                except StopIteration as done:
                    results.append(done.value)
            assert not (rounds and results), "ranks must end a conversation together"
            if results:
                return results
            answers = self.answer(rounds)

    def echo(self, asks: Sequence[Request]) -> list[Any]:
        """Answer asks as if every rank had asked the same, off the record."""
        talk = fuse(asks, self.world)
        heard: Any = None
        try:
            while True:
                heard = move([talk.send(heard)] * self.world)[0]
        except StopIteration as done:
            answers: list[Any] = done.value
            return answers

    def answer(self, rounds: Sequence[Sequence[Request]]) -> list[list[Any]]:
        """Answer one round of every rank."""
        talks = [fuse(asks, self.world) for asks in rounds]
        heard: list[Any] = [None] * self.world
        while True:
            asked: list[Collective] = []
            results: list[list[Any]] = []
            for talk, tensor in zip(talks, heard, strict=True):
                try:
                    asked.append(talk.send(tensor))
                except StopIteration as done:
                    results.append(done.value)
            if results:
                return results
            for rank, collective in enumerate(asked):
                self.traffic[rank] += traffic(collective, rank, self.world)
            heard = move(asked)


def asked_of(asks: Sequence[Request], world: int) -> list[Collective]:
    """The collectives that these asks would take; their tensors need no content, only a shape."""
    collectives: list[Collective] = []
    talk = fuse(asks, world)
    try:
        collectives.append(next(talk))
        while True:
            last = collectives[-1]
            if isinstance(last, AllGatherOp):
                answer = last.tensor.new_empty(world, last.tensor.numel())
            elif isinstance(last, AllToAllOp):
                answer = last.tensor.new_empty(sum(last.into))
            else:
                answer = last.tensor
            collectives.append(talk.send(answer))
    except StopIteration:
        return collectives


def move(asked: Sequence[Collective]) -> list[Tensor]:
    """Carry out one collective of all ranks."""
    tensors = [collective.tensor for collective in asked]
    first = asked[0]
    if isinstance(first, AllReduceOp):
        total = tensors[0].clone()
        for x in tensors[1:]:
            total = total + x if first.op == "sum" else torch.maximum(total, x)
        return [total] * len(asked)
    if isinstance(first, AllGatherOp):
        return [torch.stack(tensors)] * len(asked)
    if isinstance(first, BroadcastOp):
        return [tensors[0]] * len(asked)
    rows = [x.split(list(c.out)) for x, c in zip(tensors, asked, strict=True) if isinstance(c, AllToAllOp)]
    return [torch.cat([row[rank] for row in rows]) for rank in range(len(asked))]
