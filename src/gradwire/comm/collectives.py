"""From asks to collectives: however many lanes ask, one collective per kind and round.

Fusing is a conversation too: `fuse` yields collectives and is sent their results, so that real process groups and the
in-process `lockstep` share every line of it, and their bytes are counted in one place.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from gradwire.comm.alphabeta import ring_pieces
from gradwire.core.payload import Payload
from gradwire.core.requests import Gather, Max, Request, SendRecv, Sum


@dataclass(frozen=True)
class AllReduceOp:
    """Result: the elementwise sum, or maximum."""

    tensor: Tensor
    op: str  # "sum" or "max"


@dataclass(frozen=True)
class AllGatherOp:
    """Equally long byte vectors. Result: [world, n]."""

    tensor: Tensor


@dataclass(frozen=True)
class AllToAllOp:
    """Bytes for each rank, laid end to end. Result: the bytes from each rank, laid end to end."""

    tensor: Tensor
    out: tuple[int, ...]
    into: tuple[int, ...]


@dataclass(frozen=True)
class BroadcastOp:
    """Result: rank 0's tensor."""

    tensor: Tensor


Collective: TypeAlias = AllReduceOp | AllGatherOp | AllToAllOp | BroadcastOp


@dataclass(frozen=True)
class Traffic:
    """Bytes that cross one rank's wire, and the collectives and messages that carried them."""

    sent: float = 0.0
    received: float = 0.0
    collectives: int = 0
    messages: float = 0.0  # that this rank sends: what headers and acknowledgments are for

    def __add__(self, other: "Traffic") -> "Traffic":
        return Traffic(
            self.sent + other.sent,
            self.received + other.received,
            self.collectives + other.collectives,
            self.messages + other.messages,
        )


def traffic(collective: Collective, rank: int, world: int) -> Traffic:
    """What a collective costs one rank: the bytes of tensors, without the headers of any transport.

    It models what gloo does, measured at 2, 3 and 4 ranks: all-reduce and all-gather go around a ring, whatever the
    size, to within the few bytes by which its segments differ; all-to-all sends each block straight to its owner;
    broadcast is a binomial tree, in which rank r passes the tensor on to every r + 2^i with 2^i > r.
    NCCL chooses among algorithms by size and topology; where it takes rings, this holds there too.
    """
    x = collective.tensor
    n = x.numel() * x.element_size()
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


def fuse(asks: Sequence[Request], world: int) -> Generator[Collective, Tensor, list[Any]]:
    """Answer all asks of one round."""
    answers: list[Any] = [None] * len(asks)
    for kind, op in ((Sum, "sum"), (Max, "max")):
        for dtype in dict.fromkeys(a.tensor.dtype for a in asks if isinstance(a, kind)):
            chosen = {i: a.tensor for i, a in enumerate(asks) if isinstance(a, kind) and a.tensor.dtype == dtype}
            message = torch.cat([x.flatten() for x in chosen.values()])
            total = (yield AllReduceOp(message, op)) if message.numel() else message
            parts = total.split([x.numel() for x in chosen.values()])
            for (i, x), part in zip(chosen.items(), parts, strict=True):
                answers[i] = part.view_as(x)
    gathers = {i: a for i, a in enumerate(asks) if isinstance(a, Gather)}
    if gathers:
        yield from _gather(gathers, answers)
    swaps = {i: a for i, a in enumerate(asks) if isinstance(a, SendRecv)}
    if swaps:
        yield from _swap(swaps, answers, world)
    return answers


def _gather(gathers: dict[int, Gather], answers: list[Any]) -> Generator[Collective, Tensor, None]:
    """Pad every payload to the length that the group agrees on, and gather them as one vector."""
    device = next(iter(gathers.values())).payload.data.device
    sizes = {i: a.size for i, a in gathers.items() if a.size is not None}
    varying = [i for i, a in gathers.items() if a.size is None]
    if varying:
        used = torch.tensor([gathers[i].payload.nbytes for i in varying], device=device)
        longest = yield AllReduceOp(used, "max")
        sizes.update(zip(varying, longest.tolist(), strict=True))
    padded = [_pad(a.payload.data, sizes[i]) for i, a in gathers.items()]
    rows = yield AllGatherOp(torch.cat(padded))
    columns = rows.split([sizes[i] for i in gathers], dim=1)
    for i, column in zip(gathers, columns, strict=True):
        answers[i] = [Payload(row) for row in column.unbind(0)]


def _swap(swaps: dict[int, SendRecv], answers: list[Any], world: int) -> Generator[Collective, Tensor, None]:
    """Lay out all payloads by peer, then by ask."""
    ranks = range(world)
    out = [[a.out[r].data for a in swaps.values() if r in a.out] for r in ranks]
    into = [[a.into.get(r, 0) for a in swaps.values()] for r in ranks]
    message = torch.cat([data for row in out for data in row])
    lengths = tuple(sum(data.numel() for data in row) for row in out)
    heard = yield AllToAllOp(message, lengths, tuple(map(sum, into)))
    parts = iter(heard.split([n for row in into for n in row]))
    for i in swaps:
        answers[i] = {}
    for r in ranks:
        for i, a in swaps.items():
            part = next(parts)
            if r in a.into:
                answers[i][r] = Payload(part)


def _pad(data: Tensor, size: int) -> Tensor:
    assert data.numel() <= size, f"a payload of {data.numel()} bytes exceeds its size of {size}"
    if data.numel() == size:
        return data
    return torch.cat([data, data.new_zeros(size - data.numel())])
