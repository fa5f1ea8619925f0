"""Timeline: one training step, played through: what overlaps with what, and what the worker waits for.

A worker computes its backward pass while another thread, the ferry, takes launches in order as soon as their gradients
are there, and takes each through its acts: work that needs the processor, and time on the wire, which does not. When
both threads want a processor of which each worker has only a share, both slow down.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_NEVER = float("inf")


@dataclass(frozen=True)
class Act:
    """Something the ferry does, in seconds: ``work`` of the processor and ``wire`` side by side; over when both are.

    Attributes:
        part: Whose account it is on: ``encode``, ``wire`` or ``decode``.
    """

    part: str
    work: float = 0.0
    wire: float = 0.0

    @property
    def alone(self) -> float:
        """How long it takes when nobody else wants the processor."""
        return max(self.work, self.wire)


@dataclass(frozen=True)
class Trip:
    """One launch: when in the backward pass it is complete, from 0 to 1, and what is done with it."""

    ready: float
    acts: tuple[Act, ...]


@dataclass(frozen=True)
class Split:
    """Where the seconds of a step go: step = compute + encode + wire + decode - hidden."""

    compute: float
    encode: float
    wire: float
    decode: float
    step: float

    @property
    def hidden(self) -> float:
        """What happens behind the backward pass."""
        return max(0.0, self.compute + self.encode + self.wire + self.decode - self.step)

    @property
    def exposed(self) -> float:
        """What the worker waits for beyond its own computing."""
        return max(0.0, self.step - self.compute)


def play(forward: float, backward: float, trips: Sequence[Trip], cores: float, overlaps: bool = True) -> Split:
    """Play one step.

    Args:
        forward: Seconds before the first gradient: forward pass, and the optimizer's step.
        backward: Seconds of the backward pass, when the ferry rests.
        trips: In the order in which the ferry takes them.
        cores: Processors for each worker; two threads of a worker get the speed of min(1, cores / 2) each.
        overlaps: Whether launches leave during the backward pass; otherwise all wait for its end.
    """
    speed = min(1.0, max(0.5, cores / 2))
    now, left = 0.0, backward  # since the backward pass began, and of it
    for trip in trips:
        due = trip.ready if overlaps else 1.0
        still = max(0.0, left - (1 - due) * backward)
        now, left = now + still, left - still
        for act in trip.acts:
            now, left = _perform(act, now, left, speed)
    step = forward + now + left
    told = {part: _total(trips, part) for part in ("encode", "wire", "decode")}
    return Split(forward + backward, told["encode"], told["wire"], told["decode"], step)


def _perform(act: Act, now: float, left: float, speed: float) -> tuple[float, float]:
    """One act beside what is left of the backward pass. -> the time, and what is left then."""
    work, wire = act.work, act.wire
    while work > 0 or wire > 0:
        rate = speed if work > 0 and left > 0 else 1.0  # of every thread that computes
        ends = (work / rate if work > 0 else _NEVER, wire if wire > 0 else _NEVER, left / rate if left > 0 else _NEVER)
        passed = min(ends)
        if passed <= 0:
            break
        now += passed
        work = 0.0 if ends[0] == passed else max(0.0, work - rate * passed)
        wire = 0.0 if ends[1] == passed else max(0.0, wire - passed)
        left = 0.0 if ends[2] == passed else max(0.0, left - rate * passed)
    return now, left


def _total(trips: Sequence[Trip], part: str) -> float:
    return sum(act.alone for trip in trips for act in trip.acts if act.part == part)
