"""Drive: many talks, one conversation.

`converse` steps all lanes of a launch together, so that a round is a list of asks; `drive` has a link answer them.
Never chain rounds with callbacks of futures: their order differs between ranks.
"""

import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

from gradwire.comm.backend import Backend
from gradwire.core.requests import CommGenerator, Request

T = TypeVar("T")
Conversation: TypeAlias = Generator[list[Request], list[Any], T]


@dataclass
class Clock:
    """Seconds of host time. Work that a GPU does meanwhile is not waited for, so it is not seen."""

    encode: float = 0.0
    wire: float = 0.0
    decode: float = 0.0

    def work(self, seconds: float, spoken: bool) -> None:
        """Count work: what comes after the first words is decoding."""
        if spoken:
            self.decode += seconds
        else:
            self.encode += seconds

    def add(self, other: "Clock", share: float = 1.0, wire: bool = True) -> None:
        """Count a share of what another clock has counted."""
        self.encode += share * other.encode
        self.decode += share * other.decode
        self.wire += share * other.wire if wire else 0.0


def converse(talks: Sequence[CommGenerator[T]]) -> Conversation[list[T]]:
    """Step all talks together: each round yields the asks of those that still speak."""
    results: list[Any] = [None] * len(talks)
    answers: list[Any] = [None] * len(talks)
    speaking = list(range(len(talks)))
    while speaking:
        asks: list[Request] = []
        still = []
        for i in speaking:
            try:
                asks.append(talks[i].send(answers[i]))
                still.append(i)
            except StopIteration as done:
                results[i] = done.value
        speaking = still
        if speaking:
            heard = yield asks
            answers = [None] * len(talks)
            for i, answer in zip(speaking, heard, strict=True):
                answers[i] = answer
    return results


def drive(conversation: Conversation[T], link: Backend, clock: Clock) -> T:
    """Hold a conversation over a link, and note where the time goes."""
    began = time.perf_counter()
    spoken = False
    answers: Any = None
    try:
        while True:
            asks = conversation.send(answers)
            asked = time.perf_counter()
            answers = link.answer(asks)
            answered = time.perf_counter()
            clock.wire += answered - asked
            clock.work(asked - began, spoken)
            began, spoken = answered, True
    except StopIteration as done:
        clock.work(time.perf_counter() - began, spoken=True)
        result: T = done.value
        return result


def timed(conversation: Conversation[T], clock: Clock) -> Conversation[T]:
    """The same conversation with its work on the clock, for whoever answers it in another way than `drive`."""
    answers: Any = None
    spoken = False
    while True:
        began = time.perf_counter()
        try:
            asks = conversation.send(answers)
        except StopIteration as done:
            result: T = done.value
            return result
        finally:
            clock.work(time.perf_counter() - began, spoken)
        answers = yield asks
        spoken = True
