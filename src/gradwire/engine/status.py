"""Status: what a rank reports to the group besides its payloads. It travels with the first round of a bucket.

A corrupt message is found after that round, so it is reported with the next: that of another bucket, or of the next
step. Until then this rank's update is zero. So all ranks raise `CorruptMessageError` in the same step.

The status of a bucket is one byte for all ranks: the bits below, of any rank. It is read at once by steps that run
eagerly. Captured steps (`engine/cuda_graphs.py`) leave it on the device: the device undoes a bad step by itself, and
`Drops` counts it there.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from gradwire.core.decode_cache import memoized
from gradwire.core.payload import CorruptMessageError, Payload, spare_byte
from gradwire.core.requests import Gather, Request, SendRecv, Sum, intercept
from gradwire.engine.drive import Rounds, T

_log = logging.getLogger("gradwire")

NONFINITE = 1  # a gradient is not finite
MISSING = 2  # some parameters have no gradient
UNSUPPORTED = 4  # a gradient cannot be compressed, because it is sparse
MALFORMED = 8  # a message that was received earlier is corrupt

_MALFORMED_ADDEND = (
    -8192.0
)  # more than all ranks that lack gradients can make up for; in float16 eight of them are -inf

_CORRUPT = (
    "a message of an earlier step was damaged on the way, or comes from another model; go back to the last checkpoint, "
    "and check the network"
)
IRREVOCABLE = (
    "a gradient was not finite on some rank, and with rollback=False the error-feedback state was already overwritten, "
    "so the step cannot be dropped; go back to the last checkpoint, and attach with rollback=True, or with scaler=, "
    "which checks gradients first"
)


def with_status(
    rounds: Rounds[T], local: Tensor, flags: Sequence[Tensor], world: int
) -> Rounds[tuple[T, Tensor | None]]:
    """The same rounds, whose first one carries the status.

    Args:
        rounds: Of one bucket.
        local: uint8[1] on the device: what this rank knows before it encodes.
        flags: Bools on the device: gradients that were found to be not finite. Complete when the first round begins.
        world: Number of ranks.

    Returns:
        The result, and the status of all ranks, uint8 on the device; None if there was no round.
    """
    status: Tensor | None = None

    def serve(requests: list[Request]) -> Rounds[list[Any]]:
        nonlocal status
        if status is not None:
            return (yield requests)
        own, first = merged(local, flags), requests[0]
        if len(requests) == 1 and isinstance(first, Gather) and (spare := spare_byte(first.payload)) is not None:
            own = spare.copy_(own)  # so that message and status need not be laid end to end
        *answers, answer = yield [*requests, request_for(own, first, world)]
        status = status_in(answer)
        return answers

    return (yield from intercept(rounds, serve)), status


def merged(local: Tensor, flags: Sequence[Tensor]) -> Tensor:
    """The status of this rank, uint8[1]."""
    return local | any_of(flags) if flags else local


def gather(own: Tensor) -> Rounds[Tensor]:
    """A round of its own for the status of a bucket that has no other."""
    (answer,) = yield [Gather(Payload(own), 1)]
    return status_in(answer)


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
    addend = torch.where(own & MALFORMED != 0, _MALFORMED_ADDEND, (own & MISSING != 0).float())
    addend = torch.where(own & NONFINITE != 0, torch.inf, addend)
    return torch.where(own & UNSUPPORTED != 0, torch.nan, addend)


def status_in(answer: Any) -> Tensor:
    """The status of all ranks, uint8, in the answer to its request."""
    if isinstance(answer, Tensor):
        worst = (answer > 0).to(torch.uint8) * MISSING + (answer < 0).to(torch.uint8) * MALFORMED
        worst = torch.where(answer == torch.inf, NONFINITE, worst)
        return torch.where(answer.isnan(), UNSUPPORTED, worst).to(torch.uint8).view(())
    parts = [payload.data[:1] for payload in (answer.values() if isinstance(answer, Mapping) else answer)]
    status: Tensor = reduce(torch.bitwise_or, parts)
    return status.view(())


def read(statuses: Iterable[Tensor]) -> int:
    """The statuses of several buckets as one number. This waits for the device."""
    return reduce(or_, (memoized([status], ("status",), partial(int, status)) for status in statuses), 0)


def any_of(flags: Sequence[Tensor]) -> Tensor:
    """Whether any of several bools holds."""
    return flags[0] if len(flags) == 1 else torch.stack([flag.view(()) for flag in flags]).any()


class Drops:
    """Steps that were dropped, and whether further steps may be taken.

    Steps whose status stays on the device are counted there. A copy of the counts follows each of them without a wait,
    and is read when it has arrived.

    Args:
        device: Where steps compute.
        revertible: Whether a step can be dropped after it has begun.

    Attributes:
        malformed: uint8[1] on the device: `MALFORMED` once this rank has received a corrupt message.
        corrupt: What is wrong with that message, where the host has seen it.
    """

    def __init__(self, device: torch.device, revertible: bool = True) -> None:
        self._device, self._revertible = device, revertible
        self.malformed = torch.zeros(1, dtype=torch.uint8, device=device)
        self.corrupt = ""
        self._read = 0  # dropped steps whose status was read at once
        self._invalid = ""  # why no further step can be taken
        self._counts: Tensor | None = None  # on the device: steps that were dropped, steps with a corrupt message
        self._before = (0, 0)  # the counts when the state was replaced
        self._arrived: torch.cuda.Event | None = None

    @property
    def count(self) -> int:
        """How many there were. This waits for the device."""
        return self._read + self._all[0]

    def add(self) -> None:
        """Count one."""
        self._read += 1

    def restart(self, count: int) -> None:
        """The state was replaced by one that has dropped so many steps; what was counted so far did it no harm."""
        self._before = self._all
        self._read = count - self._before[0]
        self._invalid = self.corrupt = ""
        self.malformed.zero_()

    # -- steps whose status stays on the device ------------------------------------------------------------------------

    @property
    def counts(self) -> Tensor:
        if self._counts is None:
            self._counts = torch.zeros(2, dtype=torch.int32, device=self._device)
            self._seen = torch.zeros(2, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        return self._counts

    @property
    def _all(self) -> tuple[int, int]:
        dropped, malformed = (0, 0) if self._counts is None else self._counts.tolist()
        return dropped, malformed

    def count_(self, statuses: Sequence[Tensor]) -> Tensor:
        """Count a step on the device, by the status of its buckets. Returns whether it is dropped."""
        dropped = any_of([status != 0 for status in statuses])
        malformed = any_of([status & MALFORMED != 0 for status in statuses])
        self.counts.add_(torch.stack((dropped, malformed)))
        return dropped

    def poll(self) -> None:
        """Read what has arrived of earlier counts, and have the latest follow.

        Raises:
            CorruptMessageError: A message of an earlier step was damaged.
            RuntimeError: An earlier step was to be dropped, and could not be.
        """
        counts = self.counts
        if self._device.type == "cuda":
            if self._arrived is None:
                self._arrived = torch.cuda.Event()
            elif not self._arrived.query():
                return  # counts only grow: the next copy will tell as much
        dropped, malformed = self._seen.tolist()
        self._seen.copy_(counts, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        self._check(dropped, malformed)

    def _check(self, dropped: int, malformed: int) -> None:
        if malformed > self._before[1]:
            raise CorruptMessageError(_CORRUPT)
        if dropped > self._before[0] and not self._revertible:
            raise RuntimeError(IRREVOCABLE)

    # -- whether a step may be taken -----------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for all steps, and make sure that the state is valid.

        Raises:
            CorruptMessageError: A corrupt message was received.
            RuntimeError: A step was to be dropped, and could not be.
        """
        self.assert_valid()
        self._check(*self._all)
        if self.malformed.any():
            self.raise_corrupt()

    def report_corrupt(self, error: CorruptMessageError) -> None:
        """Have all ranks raise an error with the next status."""
        _log.error("gradwire: %s; all ranks stop at the next step", error)
        self.corrupt = str(error)
        self.malformed.fill_(MALFORMED)

    def raise_corrupt(self) -> None:
        """Raise the error that `report_corrupt` has announced, here or on another rank."""
        self._invalid = self.corrupt or _CORRUPT
        raise CorruptMessageError(self._invalid)

    def assert_valid(self) -> None:
        """Make sure that a step may be taken.

        Raises:
            RuntimeError: An earlier one was to be dropped, and could not be.
        """
        if self._invalid:
            raise RuntimeError(self._invalid)

    def assert_revertible(self) -> None:
        """Make sure that the current step can be dropped.

        Raises:
            RuntimeError: The state has been overwritten already.
        """
        if not self._revertible:
            self.invalidate(IRREVOCABLE)

    def invalidate(self, why: str) -> None:
        """Raise an error, now and until another state is loaded."""
        self._invalid = why
        self.assert_valid()
