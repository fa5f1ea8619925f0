"""The start: first steps in which all replicas stay equal, since gradients are averaged or batches are the same."""

from dataclasses import dataclass, field

from gradwire.comm import Backend, Traffic
from gradwire.core import Scope
from gradwire.engine import RoundGenerator
from gradwire.integrations.local.outer import OuterWeights
from gradwire.integrations.wire import Wire
from gradwire.local import LocalMethod


@dataclass
class Start:
    """The first steps of a training, and their account.

    Attributes:
        method: How many they are, and in which of them all workers take the same batches.
        wire: Averages their gradients; None where nothing is sent in any of them.
        link: What rounds use, too.
        mixed: Whether ranks have devices of different types, whose inner optimizers round differently.
        steps: Of this handle's own account.
        unsent: Those of them that sent nothing.
        traffic: Of the link when the last of them ended.
        payload: Bytes that were encoded when ranks compared their weights.
        averaged: Whether the gradients of the coming step are means already.
    """

    method: LocalMethod
    wire: Wire | None
    link: Backend
    mixed: bool = False
    steps: int = 0
    unsent: int = 0
    traffic: Traffic = field(default_factory=Traffic)
    payload: int = 0
    averaged: bool = False

    def sends(self, step: int) -> bool:
        """Whether the gradients of a step are averaged."""
        begun = [chosen for first, chosen in self.method.phases if first <= step]
        return step < self.method.start and begun[-1] is not None

    def require_averaged(self, step: int) -> None:
        """Refuse a step whose gradients are those of this rank alone."""
        if self.sends(step) and not self.averaged:
            raise RuntimeError(
                f"the first {self.method.start} steps average gradients, and those of step {step} are not yet; "
                "call average_gradients() of the handle after backward(), before optimizer.step()"
            )

    def count_average(self) -> None:
        """Note that the gradients of the coming step are means."""
        self.averaged, self.traffic = True, self.link.traffic

    def count_step(self) -> None:
        self.steps, self.unsent = self.steps + 1, self.unsent + (not self.averaged)
        self.averaged = False

    def compares(self, steps: int) -> bool:
        """Whether ranks compare their weights after so many steps.

        They do when steps without traffic end. Inner optimizers may differ by rounding then, and move weights apart in
        the rest of the start, so that they do at its end, too. So do those of a group with devices of different types.
        """
        start, phases = self.method.start, self.method.phases
        if not start or not (self.mixed or any(chosen is None for _, chosen in phases)):
            return False
        return steps == start or (0 < steps < start and self.sends(steps) and not self.sends(steps - 1))

    def compare(self, outer: OuterWeights, sharded: bool = False) -> RoundGenerator[None]:
        """Compare weights with all ranks; of a sharded replica, with those that hold the same shards."""
        scope: Scope = "across" if sharded else "world"
        sent = yield from outer.average_if_different(self.link.size_of(scope), scope)
        self.payload, self.traffic = self.payload + sent, self.link.traffic
