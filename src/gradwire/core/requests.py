"""Requests: all that an exchange may want from the group, and how generators of requests are driven.

An exchange is a generator. It yields a request and is sent the answer; it never sees the network. The scope of a
request says which ranks it reaches: those between which messages are compressed, which are all ranks, or, where ranks
share hosts, the counterparts on other hosts; the ranks of this host; or the whole world.
"""

from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeAlias, TypeVar

from torch import Tensor

from gradwire.core.payload import Payload

Scope: TypeAlias = Literal["across", "host", "world"]


@dataclass(frozen=True)
class Sum:
    """The elementwise sum over the group, in the tensor's own dtype."""

    tensor: Tensor
    scope: Scope = "across"


@dataclass(frozen=True)
class Max:
    """The elementwise maximum over the group."""

    tensor: Tensor
    scope: Scope = "across"


@dataclass(frozen=True)
class Gather:
    """All ranks receive all payloads. Answer: a list of them, in rank order; None stands for a rank that is absent.

    Attributes:
        payload: The payload of this rank.
        size: The common length if all ranks have it beforehand; None if lengths differ, which costs the group one
            agreement on the longest.
    """

    payload: Payload
    size: int | None = None
    scope: Scope = "across"


@dataclass(frozen=True)
class SendRecv:
    """Each peer receives a payload of its own. Answer: a dict of the payloads received, by peer.

    Attributes:
        out: One payload for each peer that receives from this rank.
        into: How many bytes each peer sends to this rank.
    """

    out: Mapping[int, Payload]
    into: Mapping[int, int]
    scope: Scope = "across"


Request: TypeAlias = Sum | Max | Gather | SendRecv
R = TypeVar("R")
T = TypeVar("T")
# The type of an answer depends on the request, which generators cannot express; hence Any.
CommGenerator: TypeAlias = Generator[Request, Any, T]


@dataclass(frozen=True)
class Finished(Generic[T]):
    """A generator has ended, and returned this."""

    value: T


def advance(generator: Generator[R, Any, T], answer: Any = None) -> "R | Finished[T]":
    """Send an answer into a generator. Returns its next request, or `Finished`."""
    try:
        return generator.send(answer)
    except StopIteration as stop:
        return Finished(stop.value)


def run(generator: Generator[R, Any, T], serve: Callable[[R], Any]) -> T:
    """Run a generator to its end. ``serve`` answers every request."""
    request = advance(generator)
    while not isinstance(request, Finished):
        request = advance(generator, serve(request))
    return request.value


def intercept(
    generator: Generator[R, Any, T], serve: Callable[[R], Generator[Any, Any, Any]]
) -> Generator[Any, Any, T]:
    """The same generator with every request served by a generator, which may yield requests of its own."""
    request = advance(generator)
    while not isinstance(request, Finished):
        request = advance(generator, (yield from serve(request)))
    return request.value
