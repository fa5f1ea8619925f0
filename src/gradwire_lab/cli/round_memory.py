"""What a worker holds for local steps, beside its model and inner optimizer: the figures of `plan` and `show`."""

from collections.abc import Callable
from typing import NamedTuple

import torch

from gradwire.engine import Lane, Plan
from gradwire.engine.state import zeros
from gradwire.local import LocalMethod


class RoundMemory(NamedTuple):
    """In numbers of float32.

    Attributes:
        outer: Outer weights, with their momentum.
        errors: What the feedback of the message keeps, and what a server keeps of its slice.
        kept: Of the errors, what weights hold.
        differences: Of weights, during a round.
        has_momentum: Whether outer weights have it.
        in_fragments: Whether differences are those of a part of the model.
    """

    outer: int
    errors: int
    kept: int
    differences: int
    has_momentum: bool
    in_fragments: bool

    @classmethod
    def of(cls, rounds: LocalMethod, message: Plan) -> "RoundMemory":
        """Of rounds, those of a schedule included, whose differences are sent by a plan."""
        phases = (rounds, *(chosen for _, chosen in rounds.later))
        has_momentum, keeps = any(one.momentum for one in phases), any(one.keep for one in phases)
        vector = sum(lane.tensors.total for lane in message.lanes)
        errors = sum(memory_of(lane, message.world) for lane in message.lanes)
        in_fragments = rounds.fragments != 1 and rounds.stagger
        return cls(vector * (1 + has_momentum), errors, vector * keeps, vector, has_momentum, in_fragments)

    @property
    def lasting(self) -> int:
        """What is held between rounds, too."""
        return self.outer + self.errors + self.kept

    def text(self, size: Callable[[float], str]) -> str:
        """Part by part, in the words that a function makes of float32 bytes."""
        momentum = " with momentum" if self.has_momentum else ""
        error = f", errors {size(4 * self.errors)}" if self.errors else ""
        error += f", what is kept of them {size(4 * self.kept)}" if self.kept else ""
        before = f", and errors from before the round {size(4 * self.errors)}" if self.errors else ""
        most = "at most " if self.in_fragments else ""
        return (
            f"outer weights{momentum} {size(4 * self.outer)}, on the host with outer_device='cpu'{error}; during a "
            f"round also {most}differences {size(4 * self.differences)}{before}"
        )


def memory_of(lane: Lane, world: int) -> int:
    """How many numbers of float32 a lane keeps on the first of so many ranks."""
    memories = zeros(lane.state_specs(world), lane.tensors, 0, world, torch.device("meta"))
    return sum(x.numel() for x in memories.values())
