"""Report of local steps: bytes of the start, bytes of the rounds, and both against a float32 gradient in every step."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gradwire.integrations.local.fragment import Fragment, step_bytes
from gradwire.integrations.local.start import Start
from gradwire.integrations.report import Report, count, in_start, times
from gradwire.integrations.wire import Wire

if TYPE_CHECKING:
    from gradwire.integrations.local.handle import LocalSync

_SUMMED = ("payload", "dense", "encode_seconds", "wire_seconds", "decode_seconds")


@dataclass(frozen=True)
class LocalReport:
    """A snapshot of one rank's account. Ratios are against a float32 gradient in every inner step.

    Attributes:
        start_steps: Steps of the start.
        local_steps: Inner steps of the rounds that have ended, on average over ranks.
        start: Bytes and seconds of those gradients; None without a start.
        rounds: Bytes and seconds of the rounds; buffers are in what was sent, not in the payload.
        dense: Float32 bytes of the inner steps of those rounds, as this rank would have encoded them.
        note: Where in its start the training is, if it is; and from which step this account begins, if a state was
            loaded.
    """

    start_steps: int
    local_steps: int
    start: Report | None
    rounds: Report
    dense: float
    note: str = ""

    @property
    def skipped(self) -> int:
        """Rounds that were skipped because a difference was not finite."""
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
    def payload_ratio(self) -> float:
        """Of the rounds: float32 bytes of all inner steps, over bytes encoded."""
        return _over(self.dense, self.rounds.payload)

    @property
    def wire_ratio(self) -> float:
        """Of the rounds: bytes that a float32 ring all-reduce sends in all inner steps, over bytes sent."""
        return _over(self._ring * self.dense, self.rounds.sent)

    @property
    def payload_ratio_all_in(self) -> float:
        """The same with the start."""
        return _over(self._dense_all_in, self.payload)

    @property
    def wire_ratio_all_in(self) -> float:
        """The same with the start."""
        return _over(self._ring * self._dense_all_in, self.sent)

    @property
    def _ring(self) -> float:
        parties = self.rounds.hosts or self.rounds.world
        return 2 * (parties - 1) / parties

    @property
    def _dense_all_in(self) -> float:
        return self.dense + (0 if self.start is None else self.start.dense)

    def __str__(self) -> str:
        if not self.rounds.steps and self.start is None:
            return "no round has ended yet: nothing was sent, and the weights of workers differ"
        begun = [] if self.start is None else [f"{count(self.start_steps, 'step')} of the start"]
        taken = f"{count(self.local_steps, 'local step')} in {count(self.rounds.steps, 'round')}"
        lines = [
            ", ".join((*begun, taken)),
            *filter(None, [self.note]),
            f"against float32 in every step: {'; '.join(self._ratios())}",
            *([] if self.start is None else ["", "the start:", str(self.start)]),
            *(["", "the rounds, by themselves:", self.rounds.text("round")] if self.rounds.steps else []),
        ]
        return "\n".join(lines)

    def _ratios(self) -> list[str]:
        found = [_ratio_text(self.payload_ratio, self.wire_ratio)] if self.rounds.steps else []
        if self.start is None:
            return found
        return [*found, f"with the start {_ratio_text(self.payload_ratio_all_in, self.wire_ratio_all_in)}"]


def _ratio_text(payload: float, wire: float) -> str:
    sent = f"{times(wire)} less sent" if wire < math.inf else "nothing sent"
    return f"payload {times(payload)} smaller, {sent}"


def where(handle: "LocalSync") -> str:
    """Where in its rounds a training is, and the rate of the outer optimizer, which a scheduler may have changed."""
    H = handle.method.H if handle.uneven_steps is None else handle.uneven_steps.own
    rates = " and ".join(dict.fromkeys(f"{float(group['lr']):g}" for group in handle.optimizer.param_groups))
    return f"step {handle.steps}, {handle.inside} of {H} in the round, outer rate {rates}"


def summarize(
    wires: Sequence[Wire], fragments: Sequence[Fragment], start: Start, steps: int, loaded: int = 0
) -> LocalReport:
    """The report of the start and of the rounds after so many inner steps. Both share a link.

    If a state was ``loaded``, the account begins after its steps.
    """
    whole = wires[0].report()  # all fragments are on its account
    before = {name: getattr(start.traffic, name) for name in ("sent", "received", "collectives")}
    after = {name: getattr(whole, name) - n for name, n in before.items()}
    rounds = replace(whole, skipped=sum(wire.report().skipped for wire in wires), **after)
    taken, dense = max(one.steps for one in fragments), sum(one.dense for one in fragments)
    first = None
    if start.wire is not None:
        first = replace(_with_unsent(start.wire.report(), wires, start), **before)
    elif start.steps:
        none: dict[str, Any] = {**dict.fromkeys(("steps", "skipped", *_SUMMED), 0), "rules": {}, "rule_seconds": {}}
        first = replace(_with_unsent(replace(rounds, **none), wires, start), **before)
    since = f"since step {loaded}, whose state was loaded; what was sent before is not counted" if loaded else ""
    note = "\n".join(filter(None, [in_start(steps, start.method.start), since]))
    return LocalReport(start.steps, taken, first, rounds, dense, note)


def _with_unsent(sent: Report, wires: Sequence[Wire], start: Start) -> Report:
    """The report of the start: what was sent, and steps without traffic."""
    steps, dense = sent.steps + start.unsent, sent.dense + step_bytes(wires) * start.unsent
    return replace(sent, steps=steps, payload=sent.payload + start.payload, dense=dense)


def _over(dense: float, sent: float) -> float:
    return dense / sent if sent else math.inf
