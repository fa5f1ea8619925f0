"""Timeline: one training step, simulated: what overlaps with what, and what the worker waits for.

A worker computes its backward pass while another thread, the communication thread, takes buckets in order as soon as
their gradients are there: work that needs the processor, and time on the wire, which does not. When both threads want
a processor of which each worker has only a share, both slow down.
"""

from collections.abc import Sequence
from dataclasses import dataclass

_NEVER = float("inf")


@dataclass(frozen=True)
class CommWork:
    """What the communication thread does, in seconds: ``work`` of the processor beside ``wire``; over when both are.

    Attributes:
        part: Whose account it is on: ``encode``, ``wire`` or ``decode``.
    """

    part: str
    work: float = 0.0
    wire: float = 0.0

    @property
    def alone(self) -> float:
        """How long it takes on an idle processor."""
        return max(self.work, self.wire)


@dataclass(frozen=True)
class BucketTimeline:
    """One bucket: when in the backward pass it is complete, from 0 to 1, and what is done with it."""

    ready: float
    parts: tuple[CommWork, ...]


@dataclass(frozen=True)
class StepTime:
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

    def shared(self, steps: int) -> "StepTime":
        """Where one exchange, of which nothing is hidden, serves so many steps."""
        encode, wire, decode = (part / steps for part in (self.encode, self.wire, self.decode))
        return StepTime(self.compute, encode, wire, decode, self.compute + encode + wire + decode)


def simulate_step(
    forward: float, backward: float, timelines: Sequence[BucketTimeline], cores: float, overlaps: bool = True
) -> StepTime:
    """Simulate one step.

    Args:
        forward: Seconds before the first gradient: forward pass, and the optimizer's step.
        backward: Seconds of the backward pass, when nothing is sent.
        timelines: Of the buckets, in order.
        cores: Processors for each worker; two threads of a worker get the speed of min(1, cores / 2) each.
        overlaps: Whether buckets leave during the backward pass; otherwise all wait for its end.
    """
    speed = min(1.0, max(0.5, cores / 2))
    now, left = 0.0, backward  # since the backward pass began, and of it
    for timeline in timelines:
        due = timeline.ready if overlaps else 1.0
        still = max(0.0, left - (1 - due) * backward)
        now, left = now + still, left - still
        for item in timeline.parts:
            now, left = _run_beside_backward(item, now, left, speed)
    step = forward + now + left
    items = [item for timeline in timelines for item in timeline.parts]
    encode, wire, decode = (
        sum(item.alone for item in items if item.part == part) for part in ("encode", "wire", "decode")
    )
    return StepTime(forward + backward, encode, wire, decode, step)


def _run_beside_backward(item: CommWork, now: float, left: float, speed: float) -> tuple[float, float]:
    """One piece of work beside what is left of the backward pass. -> the time, and what is left then."""
    if left <= 0:
        return now + item.alone, 0.0
    work, wire = item.work, item.wire
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
