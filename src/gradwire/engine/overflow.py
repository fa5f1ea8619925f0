"""Overflow: a step with a gradient that is not finite on any rank is skipped on all ranks, and changes no state.

    found      by the encoder, as it reads the gradients (`engine/encoders.py`); it sets a flag on the device
    reported   as `NONFINITE` in the status of the bucket, which all ranks receive (`engine/status.py`)
    skipped    by `Engine.finish`, once the host has read the status; by the device itself where a captured step leaves
               it there (`undo_if_skipped` in `graph_buffers.py`)
    counted    here, as ``wire.skipped``

With a GradScaler gradients are checked before anything is encoded (`integrations/grad_scaler.py`). Without rollback,
the state is overwritten by then, so that overflow is an error. Corrupt messages are counted here, too: they end the
training on all ranks.
"""

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.core import CorruptMessageError
from gradwire.core.graph_refs import cached_on_device
from gradwire.engine.status import BAD, CORRUPT

_log = logging.getLogger("gradwire")

_CORRUPT_MESSAGE = (
    "a message of an earlier step was damaged on the way, or comes from another model; go back to the last checkpoint, "
    "and check the network"
)
CANNOT_SKIP = (
    "a gradient was not finite on some rank, and with rollback=False the error-feedback state was already overwritten, "
    "so it is too late to skip the step; go back to the last checkpoint, and attach with rollback=True or scaler=, "
    "which checks gradients first"
)


@cached_on_device(16)
def _bits(device: torch.device) -> Tensor:
    """What makes a step one that is skipped, and one with a corrupt message; uint8[2, 1]."""
    return torch.tensor([[BAD], [CORRUPT]], dtype=torch.uint8, device=device)


class SkippedSteps:
    """Steps that were skipped, and whether further steps may be taken.

    Steps whose status stays on the device are counted there. A copy of the counts follows each of them, and is read
    after the next.

    Args:
        device: Where steps compute.
        rollback: Whether a step can be skipped after it has begun.

    Attributes:
        corrupt_bit: uint8[1] on the device: `CORRUPT` once this rank has received a corrupt message.
        corrupt_error: What is wrong with that message, where the host has seen it.
    """

    def __init__(self, device: torch.device, rollback: bool = True) -> None:
        self._device, self._rollback = device, rollback
        self.corrupt_bit = torch.zeros(1, dtype=torch.uint8, device=device)
        self.corrupt_error = ""
        self._host_count = 0  # skipped steps whose status was read at once
        self._invalid: Exception | None = None  # why no further step can be taken
        self._device_counts: Tensor | None = None  # of steps that were skipped, and of steps with a corrupt message
        self._counts_at_restart = (0, 0)  # the counts when the state was replaced
        self._copy_done: torch.cuda.Event | None = None

    @property
    def count(self) -> int:
        """How many there were. This waits for the device."""
        return self._host_count + self._wait_for_counts()[0]

    def add(self) -> None:
        """Count one."""
        self._host_count += 1

    def restart(self, count: int) -> None:
        """Start from a state that has skipped so many steps. Earlier errors do not concern it."""
        self._counts_at_restart = self._wait_for_counts()
        self._host_count = count - self._counts_at_restart[0]
        self._invalid, self.corrupt_error = None, ""
        self.corrupt_bit.zero_()

    # -- steps whose status stays on the device ------------------------------------------------------------------------

    @property
    def device_counts(self) -> Tensor:
        if self._device_counts is None:
            self._device_counts = torch.zeros(2, dtype=torch.int32, device=self._device)
            self._host_copy = torch.zeros(2, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        return self._device_counts

    def _wait_for_counts(self) -> tuple[int, int]:
        skipped, corrupt = (0, 0) if self._device_counts is None else self._device_counts.tolist()
        return skipped, corrupt

    def count_on_device_(self, statuses: Sequence[Tensor]) -> Tensor:
        """Count a step on the device, by the status of its buckets. Returns whether it is skipped."""
        # All buckets together: the optimizer waits for each of these kernels.
        found = statuses[0] if len(statuses) == 1 else torch.stack([status.view(()) for status in statuses])
        seen = (found & _bits(self._device)).any(1)
        self.device_counts.add_(seen)
        return seen[0].view(torch.bool)

    def poll(self) -> None:
        """Read the counts up to the step before, and have the latest follow.

        This waits for the step before, and never for the current one. So all ranks that
        leave their status on the device raise an error in the same step; one that reads it at once, a step before.

        Raises:
            CorruptMessageError: A message of an earlier step was corrupt.
            RuntimeError: An earlier step was to be skipped, and could not be.
        """
        counts = self.device_counts
        if self._device.type == "cuda":
            self._copy_done = self._copy_done or torch.cuda.Event()
            self._copy_done.synchronize()
        skipped, corrupt = self._host_copy.tolist()
        self._host_copy.copy_(counts, non_blocking=True)
        if self._copy_done is not None:
            self._copy_done.record()
        self._check(skipped, corrupt)

    def _check(self, skipped: int, corrupt: int) -> None:
        if corrupt > self._counts_at_restart[1]:
            self.raise_corrupt()
        if skipped > self._counts_at_restart[0] and not self._rollback:
            self.invalidate(CANNOT_SKIP)

    # -- whether a step may be taken -----------------------------------------------------------------------------------

    def synchronize(self) -> None:
        """Wait for all steps, and make sure that the state is valid.

        Raises:
            CorruptMessageError: A corrupt message was received.
            RuntimeError: A step was to be skipped, and could not be.
        """
        self.assert_valid()
        self._check(*self._wait_for_counts())
        if self.corrupt_bit.any():
            self.raise_corrupt()

    def report_corrupt(self, error: CorruptMessageError) -> None:
        """Have all ranks raise an error with the next status."""
        _log.error("gradwire: %s; all ranks stop at the next step", error)
        self.corrupt_error = str(error)
        self.corrupt_bit.fill_(CORRUPT)

    def raise_corrupt(self) -> None:
        """Raise the error that `report_corrupt` has announced, here or on another rank."""
        self._invalid = CorruptMessageError(self.corrupt_error or _CORRUPT_MESSAGE)
        raise self._invalid

    def assert_valid(self) -> None:
        """Make sure that a step may be taken.

        Raises:
            CorruptMessageError: A corrupt message was received.
            RuntimeError: An earlier one was to be skipped, and could not be.
        """
        if self._invalid is not None:
            raise self._invalid.with_traceback(None)

    def assert_can_skip(self) -> None:
        """Make sure that the current step can be skipped.

        Raises:
            RuntimeError: The state has been overwritten already.
        """
        if not self._rollback:
            self.invalidate(CANNOT_SKIP)

    def invalidate(self, why: str) -> None:
        """Raise an error, now and until another state is loaded."""
        self._invalid = RuntimeError(why)
        self.assert_valid()
