"""The start: first steps in which all replicas stay equal, since gradients are averaged or batches are the same."""

from dataclasses import dataclass, field

from gradwire.comm.backend import Backend
from gradwire.comm.collectives import Traffic
from gradwire.integrations.wire import Wire


@dataclass
class Start:
    """The first steps of a training, and their account.

    Attributes:
        length: How many they are; 0 for none.
        wire: Averages their gradients; None where all workers take the same batches.
        link: What rounds use, too.
        steps: Of this handle's own account.
        traffic: Of the link when the last of them ended.
        payload: Bytes that were encoded at the end of a start without traffic.
        averaged: Whether the gradients of the coming step are means already.
    """

    length: int
    wire: Wire | None
    link: Backend
    steps: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    payload: int = 0
    averaged: bool = False

    def require_averaged(self, step: int) -> None:
        """Refuse a step whose gradients are those of this rank alone."""
        if self.wire is not None and step < self.length and not self.averaged:
            raise RuntimeError(
                f"the first {self.length} steps average gradients, and those of step {step} are not yet; "
                "call average_gradients() of the handle after backward(), before optimizer.step()"
            )

    def count_average(self) -> None:
        """Note that the gradients of the coming step are means."""
        self.averaged, self.traffic = True, self.link.traffic

    def count_step(self) -> None:
        self.steps, self.averaged = self.steps + 1, False

    def ends_unsent(self, steps: int) -> bool:
        """Whether a start without traffic has ended with the last of so many steps."""
        return self.wire is None and 0 < self.length == steps

    def count_end(self, sent: int) -> None:
        """Note the bytes by which ranks then compared their weights."""
        self.payload, self.traffic = sent, self.link.traffic
