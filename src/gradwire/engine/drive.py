"""Drive: how generators of requests are run, and what is counted of them: bytes and seconds by rule.

`interleave` steps all lanes of a bucket together, so that a round is a list of requests; `execute` has a backend answer
them. Rounds are never chained with callbacks of futures: their order would differ between ranks.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeVar

from gradwire.core import CommGenerator, Gather, Request, SendRecv
from gradwire.core.requests import Finished, R, advance, intercept, run

T = TypeVar("T")
RoundGenerator: TypeAlias = Generator[list[Request], list[Any], T]  # yields rounds: lists of requests


@dataclass
class Clock:
    """Seconds of host time. Work that a GPU does meanwhile is not waited for, so it is not seen."""

    encode: float = 0.0
    wire: float = 0.0
    decode: float = 0.0

    def work(self, seconds: float, decoding: bool) -> None:
        """Count work. All work after the first request is decoding."""
        if decoding:
            self.decode += seconds
        else:
            self.encode += seconds

    def add(self, other: "Clock", share: float = 1.0, wire: bool = True) -> None:
        """Count a share of what another clock has counted."""
        self.encode += share * other.encode
        self.decode += share * other.decode
        self.wire += share * other.wire if wire else 0.0


def interleave(generators: Sequence[Generator[R, Any, T]]) -> Generator[list[R], list[Any], list[T]]:
    """Step all generators together: each round yields the requests of those that have not ended."""
    steps = [advance(generator) for generator in generators]
    while running := {i: step for i, step in enumerate(steps) if not isinstance(step, Finished)}:
        answers = yield list(running.values())
        for i, answer in zip(running, answers, strict=True):
            steps[i] = advance(generators[i], answer)
    return [step.value for step in steps if isinstance(step, Finished)]


class RequestHandler(Protocol):
    """A backend, as far as rounds need one."""

    def answer(self, requests: Sequence[Request]) -> list[Any]:
        """Answer a round of requests."""


def execute(rounds: RoundGenerator[T], backend: RequestHandler, clock: Clock) -> T:
    """Have a backend answer all rounds, and measure where the time goes."""

    def serve(requests: list[Request]) -> list[Any]:
        began = time.perf_counter()
        answers = backend.answer(requests)
        clock.wire += time.perf_counter() - began
        return answers

    return run(profile(rounds, clock), serve)


def profile(rounds: Generator[Any, Any, T], clock: Clock) -> Generator[Any, Any, T]:
    """The same rounds with the time of their work on the clock."""
    began, first = time.perf_counter(), True

    def serve(requests: Any) -> Generator[Any, Any, Any]:
        nonlocal began, first
        clock.work(time.perf_counter() - began, decoding=not first)
        answers = yield requests
        began, first = time.perf_counter(), False
        return answers

    result = yield from intercept(rounds, serve)
    clock.work(time.perf_counter() - began, decoding=True)
    return result


@dataclass
class Accounting:
    """Bytes and seconds by label of a lane.

    Attributes:
        encoded: Payload bytes.
        dense: Bytes of the same gradients in float32.
        seconds: Of encoding and decoding. The network's time belongs to no lane.
    """

    encoded: Counter[str] = field(default_factory=Counter)
    dense: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, Clock] = field(default_factory=lambda: defaultdict(Clock))

    def add(self, encoded: Mapping[str, int], dense: Mapping[str, int]) -> None:
        """Count bytes by label. `Counter.update` takes ten times as long."""
        for counter, added in ((self.encoded, encoded), (self.dense, dense)):
            for label, n in added.items():
                counter[label] += n

    def counted(self, label: str, numbers: int, generator: CommGenerator[T]) -> CommGenerator[T]:
        """The same generator, which encodes so many numbers, with its payloads and its time counted.

        Raises:
            ValueError: A request is to reach other ranks than those that have the same lane.
        """
        self.dense[label] += 4 * numbers

        def serve(request: Request) -> Generator[Request, Any, Any]:
            if request.scope != "across":
                raise ValueError(
                    f"the exchange of the rule [{label}] yields a {type(request).__name__} with "
                    f"scope={request.scope!r}, and ranks of one host may compress different parameters; leave scope= "
                    "out: then it reaches all ranks that compress the same"
                )
            self.encoded[label] += nbytes(request)
            return (yield request)

        return profile(intercept(generator, serve), self.seconds[label])


def nbytes(request: Request) -> int:
    """The bytes that a request sends."""
    if isinstance(request, Gather):
        return request.payload.nbytes
    if isinstance(request, SendRecv):
        return sum(payload.nbytes for payload in request.out.values())
    return request.tensor.nbytes
