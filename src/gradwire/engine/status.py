"""Status: what a rank reports to the group besides its payloads. It travels with the first round of a bucket.

The status of a bucket is one byte for all ranks: the bits below, of any rank. It is read at once by steps that run
eagerly. Captured steps (`engine/cuda_graphs.py`) leave it on the device: the device undoes a bad step by itself, and
`DeferredStatus` counts it there.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from gradwire.core.decode_cache import memoized
from gradwire.core.payload import CorruptMessageError, Payload, spare_byte
from gradwire.core.requests import Gather, Request, SendRecv, Sum, intercept
from gradwire.engine.drive import Rounds, T

NONFINITE = 1  # a gradient is not finite
MISSING = 2  # some parameters have no gradient
UNSUPPORTED = 4  # a gradient cannot be compressed, because it is sparse

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
        mine, first = merged(local, flags), requests[0]
        if len(requests) == 1 and isinstance(first, Gather) and (spare := spare_byte(first.payload)) is not None:
            mine = spare.copy_(mine)  # so that message and status need not be laid end to end
        *answers, answer = yield [*requests, request_for(mine, first, world)]
        status = status_in(answer)
        return answers

    return (yield from intercept(rounds, serve)), status


def merged(local: Tensor, flags: Sequence[Tensor]) -> Tensor:
    """The status of this rank, uint8[1]."""
    return local | any_of(flags) if flags else local


def ask(mine: Tensor) -> Rounds[Tensor]:
    """A round of its own for the status of a bucket that has no other."""
    (answer,) = yield [Gather(Payload(mine), 1)]
    return status_in(answer)


def request_for(mine: Tensor, other: Request, world: int) -> Request:
    """The status as a request that fuses with another one of the same round."""
    if isinstance(other, Sum):
        return Sum(_addend(mine).to(other.tensor.dtype))
    if isinstance(other, Gather):
        return Gather(Payload(mine), 1)
    assert isinstance(other, SendRecv)
    return SendRecv(dict.fromkeys(range(world), Payload(mine)), dict.fromkeys(range(world), 1))


def _addend(mine: Tensor) -> Tensor:
    """A number whose sum over ranks tells the worst of their statuses: nan, infinity, or how many lack gradients."""
    addend = (mine & MISSING != 0).float()
    addend = torch.where(mine & NONFINITE != 0, torch.inf, addend)
    return torch.where(mine & UNSUPPORTED != 0, torch.nan, addend)


def status_in(answer: Any) -> Tensor:
    """The status of all ranks, uint8, in the answer to its request."""
    if isinstance(answer, Tensor):
        worst = torch.where(answer == torch.inf, NONFINITE, (answer > 0).to(torch.uint8) * MISSING)
        return torch.where(answer.isnan(), UNSUPPORTED, worst).to(torch.uint8).view(())
    parts = [payload.data[:1] for payload in (answer.values() if isinstance(answer, Mapping) else answer)]
    status: Tensor = reduce(torch.bitwise_or, parts)
    return status.view(())


def read(status: Tensor) -> int:
    """The status as a number. This waits for the device."""
    return memoized([status], ("status",), lambda: int(status))


def any_of(flags: Sequence[Tensor]) -> Tensor:
    """Whether any of several bools holds."""
    return flags[0] if len(flags) == 1 else torch.stack([flag.view(()) for flag in flags]).any()


class DeferredStatus:
    """Steps that were dropped, and steps with a corrupt message, counted on a device and read later.

    A copy of the counts follows each step without a wait, and is looked at when it has arrived.
    """

    def __init__(self, device: torch.device, revertible: bool = True) -> None:
        self._device, self._revertible = device, revertible
        self._before = (0, 0)  # the counts when the state was replaced
        self._counts: Tensor | None = None  # dropped, corrupt
        self._arrived: torch.cuda.Event | None = None

    def count_(self, dropped: Tensor, corrupt: Sequence[Tensor]) -> None:
        """Count a step on the device."""
        damaged = torch.cat([flag.flatten() for flag in corrupt]).any() if corrupt else torch.zeros_like(dropped)
        self.counts.add_(torch.stack((dropped, damaged)))

    @property
    def counts(self) -> Tensor:
        if self._counts is None:
            self._counts = torch.zeros(2, dtype=torch.int32, device=self._device)
            self._seen = torch.zeros(2, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        return self._counts

    @property
    def dropped(self) -> int:
        """How many steps were dropped. This waits for all of them."""
        return 0 if self._counts is None else int(self._counts[0])

    def reset(self) -> None:
        """The state was replaced: what was counted so far did it no harm."""
        dropped, corrupt = (0, 0) if self._counts is None else self._counts.tolist()
        self._before = dropped, corrupt

    def check(self) -> None:
        """Wait for all steps, and make sure that none was to be dropped that cannot be."""
        self._check_revertible(self.dropped)

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
        dropped, damaged = self._seen.tolist()
        self._seen.copy_(counts, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        if damaged > self._before[1]:
            raise CorruptMessageError(
                "a message of an earlier step was damaged on the way, or comes from another model; "
                "go back to the last checkpoint, and check the network"
            )
        self._check_revertible(dropped)

    def _check_revertible(self, dropped: int) -> None:
        if dropped > self._before[0] and not self._revertible:
            raise RuntimeError(IRREVOCABLE)


class Drops:
    """Steps that were dropped, and whether further steps may be taken.

    Args:
        deferred: Counts those whose status is still on the device.
        revertible: Whether a step can be dropped after it has begun.
    """

    def __init__(self, deferred: DeferredStatus, revertible: bool) -> None:
        self.deferred, self._revertible = deferred, revertible
        self._read = 0  # dropped steps whose status was read at once
        self._invalid = ""  # why no further step can be taken

    @property
    def count(self) -> int:
        """How many there were. This waits for the device."""
        return self._read + self.deferred.dropped

    def add(self) -> None:
        """Count one."""
        self._read += 1

    def restart(self, count: int) -> None:
        """The state was replaced by one that has dropped so many steps."""
        self._read = count - self.deferred.dropped
        self._invalid = ""
        self.deferred.reset()

    def synchronize(self) -> None:
        """Wait for all steps, and make sure that the state is valid.

        Raises:
            RuntimeError: A step was to be dropped, and could not be.
        """
        self.assert_valid()
        self.deferred.check()

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
            self.poison(IRREVOCABLE)

    def poison(self, why: str) -> None:
        """Raise an error, now and until another state is loaded."""
        self._invalid = why
        self.assert_valid()
