"""Hindsight: what became of steps that nobody waited for.

A host that runs ahead of its GPU does not know whether a step was dropped, nor whether a message was damaged. The
device counts both. A copy of the counts follows without anybody waiting for it, and is looked at when it has arrived.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.core.payload import CorruptMessageError

IRREVOCABLE = (
    "some rank's gradient was not finite, and memories had been changed already (rollback=False), so that the step "
    "cannot be dropped; go back to the last checkpoint, and attach with rollback=True, or with scaler=, which asks "
    "beforehand"
)


class Hindsight:
    """Steps that were dropped, and steps in which a message was damaged, counted on a device."""

    def __init__(self, device: torch.device, forgives: bool = True) -> None:
        self._device, self._forgives = device, forgives
        self._past = 0  # dropped steps that nobody asks about any more
        self._counts: Tensor | None = None  # dropped, damaged
        self._arrived: torch.cuda.Event | None = None

    def count_(self, dropped: Tensor, doubts: Sequence[Tensor]) -> None:
        """Have the device count a step, by what it knows of it."""
        if self._counts is None:
            self._counts = torch.zeros(2, dtype=torch.int32, device=self._device)
            self._seen = torch.zeros(2, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        damaged = torch.cat([doubt.flatten() for doubt in doubts]).any() if doubts else torch.zeros_like(dropped)
        self._counts += torch.stack((dropped, damaged))

    @property
    def dropped(self) -> int:
        """How many steps were dropped. Whoever asks waits for all of them."""
        return 0 if self._counts is None else int(self._counts[0])

    def begin_anew(self) -> None:
        """Memories have been replaced: what was dropped so far does them no harm."""
        self._past = self.dropped

    def check(self) -> None:
        """Wait for all steps, and make sure that none was to be dropped that cannot be."""
        self._forgive(self.dropped)

    def look(self) -> None:
        """See what has arrived of earlier counts, and have the latest follow.

        Raises:
            CorruptMessageError: A message of an earlier step was damaged.
            RuntimeError: An earlier step was to be dropped, which cannot be forgiven.
        """
        assert self._counts is not None
        if self._device.type == "cuda":
            if self._arrived is None:
                self._arrived = torch.cuda.Event()
            elif not self._arrived.query():
                return  # counts only grow: the next copy will tell as much
        dropped, damaged = self._seen.tolist()
        self._seen.copy_(self._counts, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        if damaged:
            raise CorruptMessageError(
                "a message of an earlier step was damaged on the way, or comes from another model; "
                "go back to the last checkpoint, and look at the network"
            )
        self._forgive(dropped)

    def _forgive(self, dropped: int) -> None:
        if dropped > self._past and not self._forgives:
            raise RuntimeError(IRREVOCABLE)
