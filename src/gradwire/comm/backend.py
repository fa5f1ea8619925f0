"""Backend: what carries out collectives. Nothing else knows the network."""

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradwire.comm.agreement_barrier import AgreementBarrier
from gradwire.comm.collectives import AllGatherOp, BroadcastOp, Collective, Traffic, fuse, traffic
from gradwire.comm.host_layout import HostLayout
from gradwire.core import Gather, Payload, Request, Scope, byte_tensor
from gradwire.core.requests import run


class Backend(ABC):
    """Carries out collectives for one rank.

    Attributes:
        rank: Of this process.
        world: Number of ranks.
        traffic: Bytes counted so far; where ranks share hosts, those between hosts.
    """

    rank: int
    world: int
    traffic: Traffic
    device = torch.device("cpu")  # the device of tensors in small agreements
    host_layout: HostLayout | None = None  # which ranks share a host, where that makes a difference
    inside = Traffic()  # bytes that stay inside a host
    barrier: AgreementBarrier | None = None  # where ranks meet before they agree on something
    stream_ordered = False  # collectives of CUDA tensors only queue up on the device: the host waits in none

    @abstractmethod
    def run(self, collective: Collective, out: Tensor | None = None) -> Tensor:
        """Carry out a collective and count its bytes. All ranks call the same ones in the same order.

        The result lies in ``out``, if that is given.
        """

    @abstractmethod
    def move(self, collective: Collective, out: Tensor | None = None) -> Tensor:
        """Carry out a collective that belongs to no step: its bytes are not counted."""

    def answer(self, requests: Sequence[Request]) -> list[Any]:
        """Answer a round of requests with as few collectives as there are kinds."""
        return run(fuse(requests, self.size_of(requests[0].scope)), self.run)

    def gather_json(self, note: Any) -> list[Any]:
        """The notes of all ranks, of anything that JSON can hold."""
        mine = byte_tensor(json.dumps(note).encode()).to(self.device)
        (payloads,) = self.answer([Gather(Payload(mine), scope="world")])
        return [json.loads(bytes(payload.data.tolist()).rstrip(b"\0")) for payload in payloads]

    def size_of(self, scope: str) -> int:
        """How many ranks a request of this scope reaches."""
        if self.host_layout is None or scope == "world":
            return self.world
        return self.host_layout.ranks_per_host if scope == "host" else len(self.host_layout.hosts)

    def broadcast_(self, tensor: Tensor, scope: Scope = "world") -> None:
        """Overwrite a tensor with that of the first rank in some scope."""
        tensor.copy_(self.run(BroadcastOp(tensor, scope)))


def of_one_rank(collective: Collective) -> Tensor:
    """The result of a collective among one rank."""
    return collective.tensor[None] if isinstance(collective, AllGatherOp) else collective.tensor


def copied_to(result: Tensor, out: Tensor | None) -> Tensor:
    """A result, in ``out`` if that is given."""
    return result if out is None else out.copy_(result)


def delegated(owner: str, name: str) -> Any:
    """An attribute that is one of another object."""
    return property(
        lambda self: getattr(getattr(self, owner), name),
        lambda self, value: setattr(getattr(self, owner), name, value),
    )


class UncountedBackend(Backend):
    """A backend whose bytes are counted elsewhere."""

    def run(self, collective: Collective, out: Tensor | None = None) -> Tensor:
        return self.move(collective, out)


class CountingBackend(Backend):
    """A backend that moves bytes by itself, and counts what it moves."""

    def __init__(self) -> None:
        self.traffic = Traffic()

    def run(self, collective: Collective, out: Tensor | None = None) -> Tensor:
        self.traffic += traffic(collective, self.rank, self.world)
        return self.move(collective, out)


class SingleBackend(CountingBackend):
    """A world of one: every collective is that rank's own tensor. The maths is the same; there is no network."""

    rank = 0
    world = 1
    stream_ordered = True

    def move(self, collective: Collective, out: Tensor | None = None) -> Tensor:
        return copied_to(of_one_rank(collective), out)
