"""Status: what a rank reports to the group besides its payloads. It travels with the first round of a bucket.

A corrupt message is found after that round, so it is reported with the next: that of another bucket, or of the next
step. Until then this rank's update is zero. So all ranks raise `CorruptMessageError`, in the same step if they
read the status alike.

The status of a bucket is one byte for all ranks: the bits below, of any rank. It is read at once by steps that run
eagerly. Captured steps (`engine/cuda_graphs.py`) leave it on the device: the device undoes a bad step by itself, and
`SkippedSteps` counts it there.

A rank that has all gradients need not know who lacks some: it commits all, and every parameter is in use. A rank that
lacks some reads the status. Only if all ranks lack some of a bucket (`ALL_MISSING`) may a parameter be in use nowhere;
then all of them have read the status, and ask each other.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from gradwire.core import Gather, Max, Payload, Request, Scope, SendRecv, Sum
from gradwire.core.decode_cache import memoized
from gradwire.core.graph_refs import cached_on_device
from gradwire.core.payload import spare_byte
from gradwire.core.requests import intercept
from gradwire.engine.drive import RoundGenerator, T

NONFINITE = 1  # a gradient is not finite
MISSING = 2  # some parameters have no gradient
UNSUPPORTED = 4  # a gradient cannot be compressed, because it is sparse
CORRUPT = 8  # a message that was received earlier is corrupt
ALL_MISSING = 16  # on every rank some parameter of the bucket has no gradient; found in the bits of all ranks

BAD = NONFINITE | UNSUPPORTED | CORRUPT  # no step with one of these changes any state
HOST: Scope = "host"
MAX_COUNTED_RANKS = 256  # so many can be counted in a sum of bfloat16

_CORRUPT_ADDEND = -8192.0  # more than all ranks that lack gradients can make up for; in float16 eight of them are -inf


def with_status(
    rounds: RoundGenerator[T], own_status: Tensor, nonfinite: Sequence[Tensor], world: int
) -> RoundGenerator[tuple[T, Tensor | None]]:
    """The same rounds, whose first one carries the status.

    Args:
        rounds: Of one bucket.
        own_status: uint8[1] on the device: what this rank knows before it encodes.
        nonfinite: Bools on the device: whether a gradient is not finite. Complete when the first round begins.
        world: Number of ranks.

    Returns:
        The result, and the status of all ranks, uint8 on the device; None if there was no round.
    """
    status: Tensor | None = None

    def serve(requests: list[Request]) -> RoundGenerator[list[Any]]:
        nonlocal status
        if status is not None:
            return (yield requests)
        own, first = merged(own_status, nonfinite), requests[0]
        if len(requests) == 1 and isinstance(first, Gather) and (spare := spare_byte(first.payload)) is not None:
            own = spare.copy_(own)  # so that message and status need not be laid end to end
        *answers, answer = yield [*requests, request_for(own, first, world)]
        status = status_in(answer, world)
        return answers

    return (yield from intercept(rounds, serve)), status


def merged(own_status: Tensor, nonfinite: Sequence[Tensor]) -> Tensor:
    """The status of this rank, uint8[1]."""
    return own_status | any_of(nonfinite) if nonfinite else own_status


def gather(own: Tensor) -> RoundGenerator[Tensor]:
    """A round of its own for the status of a bucket that has no other."""
    (answer,) = yield [Gather(Payload(own), 1)]
    return of_all([payload.data[:1] for payload in answer])


def request_for(own: Tensor, other: Request, world: int) -> Request:
    """The status as a request that fuses with another one of the same round."""
    if isinstance(other, Sum):
        return Sum(_addend(own).to(other.tensor.dtype))
    if isinstance(other, Gather):
        return Gather(Payload(own), 1)
    assert isinstance(other, SendRecv)
    return SendRecv(dict.fromkeys(range(world), Payload(own)), dict.fromkeys(range(world), 1))


def _addend(own: Tensor) -> Tensor:
    """A number whose sum over ranks tells the worst: nan, infinity, below zero, or how many lack gradients."""
    return _addends(own.device).index_select(0, own.int())


@cached_on_device(16)
def _addends(device: torch.device) -> Tensor:
    """By status."""

    def addend(own: int) -> float:
        if own & UNSUPPORTED:
            return torch.nan
        if own & NONFINITE:
            return torch.inf
        return _CORRUPT_ADDEND if own & CORRUPT else float(own & MISSING != 0)

    return torch.tensor([addend(own) for own in range(2 * ALL_MISSING)], device=device)


@cached_on_device(16)
def _sums(lacking: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where the ranges of such sums end, and what each of them means; the last one is nan. Sums are whole numbers."""
    ends = [-0.5, 0.5, lacking - 0.5, torch.finfo(torch.float32).max, torch.inf]
    meanings = [CORRUPT, 0, MISSING, MISSING | ALL_MISSING, NONFINITE, UNSUPPORTED]
    return torch.tensor(ends, device=device), torch.tensor(meanings, dtype=torch.uint8, device=device)


def status_in(answer: Any, world: int) -> Tensor:
    """The status of all ranks, uint8, in the answer to its request."""
    if isinstance(answer, Tensor):
        ends, meanings = _sums(world if world <= MAX_COUNTED_RANKS else 1, answer.device)
        return meanings.index_select(0, torch.bucketize(answer.float(), ends)).view(())
    payloads = answer.values() if isinstance(answer, Mapping) else answer
    return of_all([payload.data[:1] for payload in payloads if payload is not None])


def of_all(parts: Sequence[Tensor]) -> Tensor:
    """The status of all ranks, of that of each."""
    lacking = reduce(torch.bitwise_and, parts) & MISSING
    status = reduce(torch.bitwise_or, parts) | lacking * (ALL_MISSING // MISSING)
    return status.view(())


def of_host(statuses: Sequence[Tensor]) -> RoundGenerator[Tensor]:
    """What is bad in any bucket of any rank of the host, uint8: where each of them has a shard of every parameter.

    Which gradients are missing concerns the counterparts of a rank alone, and is in its statuses already.
    """
    found = torch.stack([status.view(()) for status in statuses])
    mine = torch.stack([(found & bit).amax() for bit in (NONFINITE, UNSUPPORTED, CORRUPT)]).to(torch.int32)
    (bits,) = yield [Max(mine, HOST)]
    worst: Tensor = bits.sum().to(torch.uint8)
    return worst


def read(statuses: Iterable[Tensor]) -> int:
    """The statuses of several buckets as one number. This waits for the device."""
    return reduce(or_, (memoized([status], ("status",), partial(int, status)) for status in statuses), 0)


def any_of(flags: Sequence[Tensor]) -> Tensor:
    """Whether any of several bools holds."""
    return flags[0] if len(flags) == 1 else torch.stack([flag.view(()) for flag in flags]).any()
