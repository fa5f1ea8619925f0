"""Asks: all that an exchange may want from the group.

An exchange is a generator. It yields an ask, and is sent the answer; who moves the bytes it never learns. Whom an ask
reaches is its scope: everybody, or, where ranks share hosts, those on this host, or my counterparts on the others.
"""

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from torch import Tensor

from gradwire.core.payload import Payload

Scope: TypeAlias = Literal["world", "local", "across"]


@dataclass(frozen=True)
class Sum:
    """Add my tensor to everybody's. Answer: the sum, in the tensor's own dtype."""

    tensor: Tensor
    scope: Scope = "world"


@dataclass(frozen=True)
class Max:
    """The elementwise maximum over the group."""

    tensor: Tensor
    scope: Scope = "world"


@dataclass(frozen=True)
class Gather:
    """Show everybody my payload. Answer: a list of all payloads, in rank order.

    Attributes:
        payload: My message.
        size: The common length when all ranks know it beforehand; None when lengths differ, which costs the group
            one agreement on the longest.
    """

    payload: Payload
    size: int | None = None
    scope: Scope = "world"


@dataclass(frozen=True)
class SendRecv:
    """Hand each peer its own payload. Answer: a dict of what each in-peer handed me.

    Attributes:
        out: One payload for each out-peer.
        into: How many bytes each in-peer will send.
    """

    out: Mapping[int, Payload]
    into: Mapping[int, int]
    scope: Scope = "world"


Request: TypeAlias = Sum | Max | Gather | SendRecv
T = TypeVar("T")
# What is sent back depends on the ask, which generators cannot express; hence Any.
CommGenerator: TypeAlias = Generator[Request, Any, T]
