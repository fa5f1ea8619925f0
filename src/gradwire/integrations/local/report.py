"""Report of local steps: bytes of the start, bytes of the rounds, and both against a float32 gradient in every step."""

import math
from dataclasses import dataclass, replace

from gradwire.comm.collectives import Traffic
from gradwire.integrations.report import Report
from gradwire.integrations.wire import Wire


@dataclass(frozen=True)
class LocalReport:
    """A snapshot of one rank's account. Ratios are against a float32 gradient in every inner step.

    Attributes:
        start_steps: Steps whose gradients were averaged.
        local_steps: Inner steps of the rounds that have ended.
        start: Bytes and seconds of those gradients; None without a start.
        rounds: Bytes and seconds of the rounds; buffers are in what was sent, not in the payload.
    """

    start_steps: int
    local_steps: int
    start: Report | None
    rounds: Report

    @property
    def skipped(self) -> int:
        """Rounds that were dropped because a difference was not finite."""
        return self.rounds.skipped

    @property
    def sent(self) -> float:
        """Bytes that this rank put on the wire, the start included."""
        return self.rounds.sent + (0.0 if self.start is None else self.start.sent)

    @property
    def payload(self) -> int:
        """Bytes that this rank encoded, the start included."""
        return self.rounds.payload + (0 if self.start is None else self.start.payload)

    @property
    def steps_per_round(self) -> float:
        return self.local_steps / max(1, self.rounds.steps)

    @property
    def payload_ratio(self) -> float:
        """Of the rounds: float32 bytes of all inner steps, over bytes encoded."""
        return self.rounds.payload_ratio * self.steps_per_round

    @property
    def wire_ratio(self) -> float:
        """Of the rounds: bytes that a float32 ring all-reduce sends in all inner steps, over bytes sent."""
        return self.rounds.wire_ratio * self.steps_per_round

    @property
    def payload_ratio_all_in(self) -> float:
        """The same with the start."""
        return self._dense / self.payload if self.payload else math.inf

    @property
    def wire_ratio_all_in(self) -> float:
        """The same with the start."""
        parties = self.rounds.hosts or self.rounds.world
        return 2 * (parties - 1) / parties * self._dense / self.sent if self.sent else math.inf

    @property
    def _dense(self) -> float:
        """Float32 bytes of all steps, as this rank would have encoded them."""
        return self.rounds.dense * self.steps_per_round + (0 if self.start is None else self.start.dense)

    def __str__(self) -> str:
        lines = [
            f"{self.start_steps} steps by gradients, {self.local_steps} local steps in {self.rounds.steps} rounds",
            f"against float32 in every step: payload {self.payload_ratio:.1f}x smaller, wire {self.wire_ratio:.1f}x; "
            f"with the start {self.payload_ratio_all_in:.1f}x and {self.wire_ratio_all_in:.1f}x",
            *([] if self.start is None else ["", "the start:", str(self.start)]),
            "",
            "the rounds, by themselves (a step is a round):",
            str(self.rounds),
        ]
        return "\n".join(lines)


def split(wire: Wire, starter: Wire | None, before: Traffic) -> tuple[Report | None, Report]:
    """The reports of the start and of the rounds. Both share a link, which had carried ``before`` when rounds began."""
    whole = wire.report()
    left = {name: getattr(whole, name) - getattr(before, name) for name in ("sent", "received", "collectives")}
    rounds = replace(whole, **left)
    if starter is None:
        return None, rounds
    return replace(starter.report(), **{name: getattr(before, name) for name in left}), rounds
