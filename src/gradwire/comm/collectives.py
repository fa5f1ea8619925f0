"""From requests to collectives: one collective per kind and round, however many lanes request something.

`fuse` is a generator too: it yields collectives and is sent their results, so that real process groups and the
in-process `lockstep` share every line of it, and their bytes are counted in one place.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradwire.comm.alphabeta import ring_pieces
from gradwire.core import Gather, Max, Payload, Request, Scope, SendRecv, Sum
from gradwire.core.layout import joined


@dataclass(frozen=True)
class AllReduceOp:
    """Result: the elementwise sum, or maximum."""

    tensor: Tensor
    op: str  # "sum" or "max"
    scope: Scope = "world"


@dataclass(frozen=True)
class AllGatherOp:
    """Equally long byte vectors. Result: [world, n]."""

    tensor: Tensor
    scope: Scope = "world"


@dataclass(frozen=True)
class AllToAllOp:
    """Bytes for each rank, laid end to end. Result: the bytes from each rank, laid end to end."""

    tensor: Tensor
    out: tuple[int, ...]
    into: tuple[int, ...]
    scope: Scope = "world"


@dataclass(frozen=True)
class BroadcastOp:
    """Result: rank 0's tensor."""

    tensor: Tensor
    scope: Scope = "world"


Collective: TypeAlias = AllReduceOp | AllGatherOp | AllToAllOp | BroadcastOp


@dataclass(frozen=True)
class Traffic:
    """Bytes that cross one rank's wire, and the collectives and messages that carried them."""

    sent: float = 0.0
    received: float = 0.0
    collectives: int = 0
    messages: float = 0.0  # that this rank sends: what headers and acknowledgments are for

    def __add__(self, other: "Traffic") -> "Traffic":
        sent, received = self.sent + other.sent, self.received + other.received
        return Traffic(sent, received, self.collectives + other.collectives, self.messages + other.messages)


def traffic(collective: Collective, rank: int, world: int) -> Traffic:
    """What a collective costs one rank: the bytes of tensors, without the headers of any transport.

    It models what gloo does, measured at 2, 3 and 4 ranks: all-reduce and all-gather go around a ring, whatever the
    size, to within the few bytes by which its segments differ; all-to-all sends each block straight to its owner;
    broadcast is a binomial tree, in which rank r passes the tensor on to every r + 2^i with 2^i > r.
    NCCL chooses among algorithms by size and topology; where it takes rings, this holds there too.
    """
    x, n = collective.tensor, collective.tensor.nbytes
    if isinstance(collective, AllReduceOp):
        around = 2 * (world - 1) / world
        pieces = min(x.numel(), world * ring_pieces(n / world))
        return Traffic(around * n, around * n, 1, around * pieces)
    if isinstance(collective, AllGatherOp):
        return Traffic((world - 1) * n, (world - 1) * n, 1, 2 * (world - 1))
    if isinstance(collective, AllToAllOp):
        out, into = sum(collective.out), sum(collective.into)
        peers = sum(n > 0 for other, n in enumerate(collective.out) if other != rank)
        return Traffic(out - collective.out[rank], into - collective.into[rank], 1, peers)
    children = sum(2**i > rank and rank + 2**i < world for i in range(world.bit_length()))
    return Traffic(children * n, n if rank else 0, 1, children)


def fuse(requests: Sequence[Request], world: int) -> Generator[Collective, Tensor, list[Any]]:
    """Answer all requests of one round, which have one scope, with one collective per kind."""
    (scope,) = {request.scope for request in requests}
    answers: list[Any] = [None] * len(requests)
    for kind, op in ((Sum, "sum"), (Max, "max")):
        for dtype in dict.fromkeys(r.tensor.dtype for r in requests if isinstance(r, kind)):
            chosen = {i: r.tensor for i, r in enumerate(requests) if isinstance(r, kind) and r.tensor.dtype == dtype}
            message = torch.cat([x.flatten() for x in chosen.values()])
            total = (yield AllReduceOp(message, op, scope)) if message.numel() else message
            parts = total.split([x.numel() for x in chosen.values()])
            for (i, x), part in zip(chosen.items(), parts, strict=True):
                answers[i] = part.view_as(x)
    gathers = {i: r for i, r in enumerate(requests) if isinstance(r, Gather)}
    if gathers:
        yield from _gather(gathers, answers, scope)
    exchanges = {i: r for i, r in enumerate(requests) if isinstance(r, SendRecv)}
    if exchanges:
        yield from _send_recv(exchanges, answers, world, scope)
    return answers


def _gather(gathers: dict[int, Gather], answers: list[Any], scope: Scope) -> Generator[Collective, Tensor, None]:
    """Pad every payload to the length that the group agrees on, and gather them as one vector."""
    device = next(iter(gathers.values())).payload.data.device
    sizes = {i: r.size for i, r in gathers.items() if r.size is not None}
    varying = [i for i, r in gathers.items() if r.size is None]
    if varying:
        used = torch.tensor([gathers[i].payload.nbytes for i in varying], device=device)
        longest = yield AllReduceOp(used, "max", scope)
        sizes.update(zip(varying, longest.tolist(), strict=True))
    padded = [_pad(r.payload.data, sizes[i]) for i, r in gathers.items()]
    rows = yield AllGatherOp(joined(padded), scope)
    columns = rows.split([sizes[i] for i in gathers], dim=1)
    for i, column in zip(gathers, columns, strict=True):
        answers[i] = [Payload(row) for row in column.unbind(0)]


def _send_recv(
    exchanges: dict[int, SendRecv], answers: list[Any], world: int, scope: Scope
) -> Generator[Collective, Tensor, None]:
    """Lay out all payloads by peer, then by request."""
    ranks = range(world)
    out = [[r.out[peer].data for r in exchanges.values() if peer in r.out] for peer in ranks]
    into = [[r.into.get(peer, 0) for r in exchanges.values()] for peer in ranks]
    message = torch.cat([data for row in out for data in row])
    lengths = tuple(sum(data.numel() for data in row) for row in out)
    received = yield AllToAllOp(message, lengths, tuple(map(sum, into)), scope)
    parts = iter(received.split([n for row in into for n in row]))
    for i in exchanges:
        answers[i] = {}
    for peer in ranks:
        for i, r in exchanges.items():
            part = next(parts)
            if peer in r.into:
                answers[i][peer] = Payload(part)


def _pad(data: Tensor, size: int) -> Tensor:
    assert data.numel() <= size, f"a payload of {data.numel()} bytes exceeds its size of {size}"
    if data.numel() == size:
        return data
    return torch.cat([data, data.new_zeros(size - data.numel())])
