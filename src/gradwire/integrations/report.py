"""Report: bytes sent and received, the dense bytes for comparison, and where the time went."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gradwire.comm.collectives import Traffic
from gradwire.engine import Lane
from gradwire.engine.drive import Accounting, Clock
from gradwire.engine.hosts import AnyEngine
from gradwire.engine.state import LaneState


@dataclass(frozen=True)
class Report:
    """A snapshot of one rank's account.

    Attributes:
        steps: Steps taken.
        skipped: Steps skipped because some rank's gradient was not finite.
        sent: Bytes that this rank put on the wire, padding and agreements included; with ``across="hosts"``, on that
            between hosts.
        received: Bytes that it received.
        collectives: How many collectives carried them.
        payload: Bytes that it encoded.
        dense: Bytes of the same gradients in float32, as encoded. With ``across="hosts"``, each rank of a host encodes
            a share of them.
        world: Number of ranks.
        encode_seconds: Host time until the first message of a step was ready.
        wire_seconds: Host time inside collectives.
        decode_seconds: Host time from the first answer to the update, less the wire.
        rules: Encoded and dense bytes by rule. What crosses the wire is fused, and belongs to no rule.
        rule_seconds: Host time of encoding and decoding by rule.
        hosts: Number of hosts, where only messages between them are compressed; else that of ranks.
        sent_inside: Bytes that this rank sent to others on its host: dense gradients and updates.
        received_inside: Bytes that it received from them.
        note: What this account leaves out, or where in its start the training is, if anything.
        sharded: Whether hosts stand for replicas, each of which several ranks hold together. What FSDP sends inside a
            replica is not counted.
    """

    steps: int
    skipped: int
    sent: float
    received: float
    collectives: int
    payload: int
    dense: int
    world: int
    encode_seconds: float
    wire_seconds: float
    decode_seconds: float
    rules: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    rule_seconds: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    hosts: int | None = None
    sent_inside: float = 0.0
    received_inside: float = 0.0
    note: str = ""
    sharded: bool = False

    @classmethod
    def of(cls, traffic: Traffic, clock: Clock, accounting: Accounting, **others: Any) -> "Report":
        """Put the accounts together; ``others`` are the fields that they do not have."""
        rules = {label: (accounting.encoded[label], dense) for label, dense in accounting.dense.items()}
        return cls(
            sent=traffic.sent,
            received=traffic.received,
            collectives=traffic.collectives,
            payload=sum(payload for payload, _ in rules.values()),
            dense=sum(dense for _, dense in rules.values()),
            encode_seconds=clock.encode,
            wire_seconds=clock.wire,
            decode_seconds=clock.decode,
            rules=rules,
            rule_seconds={label: (spent.encode, spent.decode) for label, spent in accounting.seconds.items()},
            **others,
        )

    @property
    def sent_per_step(self) -> float:
        return self.sent / max(1, self.steps)

    @property
    def received_per_step(self) -> float:
        return self.received / max(1, self.steps)

    @property
    def payload_ratio(self) -> float:
        """Float32 gradient bytes over bytes encoded."""
        return self.dense / self.payload if self.payload else math.inf

    @property
    def wire_ratio(self) -> float:
        """Bytes that a float32 ring all-reduce sends, over bytes sent. With hosts, both of them between hosts."""
        parties = self.world if self.hosts is None else self.hosts
        ring = 2 * (parties - 1) / parties * self.dense
        return ring / self.sent if self.sent else math.inf

    @property
    def wire_ratio_bf16(self) -> float:
        """The same against bfloat16, which is what dense training should be compared with."""
        return self.wire_ratio / 2

    def __str__(self) -> str:
        return self.text("step")

    def text(self, unit: str) -> str:
        """The account for people, where a step is called so."""
        kind = "replicas" if self.sharded else "hosts"
        where = "" if self.hosts is None else f" {'in' if self.sharded else 'on'} {self.hosts} {kind}"
        lines = [
            f"{count(self.steps, unit)} ({self.skipped} skipped), world of {self.world}{where}",
            *self._inside(unit),
            f"sent      {_bytes(self.sent)} ({_bytes(self.sent_per_step)} per {unit}) in "
            f"{count(self.collectives, 'collective')}",
            f"received  {_bytes(self.received)} ({_bytes(self.received_per_step)} per {unit})",
            f"payload   {_bytes(self.payload)} encoded, {times(self.payload_ratio)} smaller than float32",
            f"wire      {self._wire_text()}",
            f"seconds   encode {self.encode_seconds:.3f}, wire {self.wire_seconds:.3f}, "
            f"decode {self.decode_seconds:.3f}",
        ]
        for label, (payload, dense) in self.rules.items():
            encode, decode = self.rule_seconds.get(label, (0.0, 0.0))
            ratio = times(dense / payload if payload else math.inf)
            lines.append(
                f"  rule {label:12} {_bytes(payload)}, {ratio}; seconds: encode {encode:.3f}, decode {decode:.3f}"
            )
        return "\n".join((*lines, *filter(None, [self.note])))

    def _wire_text(self) -> str:
        if not self.sent:
            return "a world of one sends nothing" if self.world == 1 else "nothing was sent"
        return (
            f"{times(self.wire_ratio)} less sent than by a float32 ring all-reduce, "
            f"{times(self.wire_ratio_bf16)} less than by a bfloat16 one"
        )

    def _inside(self, unit: str) -> list[str]:
        if self.hosts is None:
            return []
        each = self.sent_inside / max(1, self.steps)
        what = "to ranks of this replica, besides FSDP" if self.sharded else "to ranks of this host, in float32"
        sent = f"inside    {_bytes(self.sent_inside)} sent ({_bytes(each)} per {unit}) {what}"
        return [sent, "between replicas:" if self.sharded else "between hosts:"]


def show(engine: AnyEngine, rank: int, world: int) -> str:
    """The plan of an engine as a table."""
    inner = engine.unwrapped
    title = f"gradwire, rank {rank} of {world}"
    if engine.ranks_per_host > 1:
        title += f", {engine.local_rank + 1} of {engine.ranks_per_host} on host {inner.rank + 1} of {inner.world}"
        title += ": its share"
    rows = [_COLUMNS, *(_row(lane, state, inner.step) for lane, state in inner.lanes)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(map(_aligned, _COLUMNS, row, widths)) for row in rows]
    rule = "  ".join("-" * n for n in widths)
    caption = "bytes: the longest payload of a rank per message; floats: memory per parameter"
    return "\n".join([title, lines[0], rule, *lines[1:], caption, ""])


_COLUMNS = ("rule", "tensors", "units", "parameters", "codec", "feedback", "exchange", "bytes", "floats")
_WORDS = {"rule", "codec", "feedback", "exchange"}


def _aligned(column: str, cell: str, width: int) -> str:
    return cell.ljust(width) if column in _WORDS else cell.rjust(width)


def _row(lane: Lane, state: LaneState, step: int) -> tuple[str, ...]:
    codec, exchange = lane.at(step)
    size = "-" if exchange.compresses_in_protocol else str(codec.size(lane.units))
    floats = sum(x.numel() for x in state.tensors.values()) / max(1, lane.units.total)
    codecs = "low rank" if exchange.compresses_in_protocol else " -> ".join(str(entry[1]) for entry in lane.step_table)
    numbers = (str(len(lane.tensors)), str(len(lane.units)), str(lane.units.total))
    return (lane.label, *numbers, codecs, str(lane.feedback), str(exchange), size, f"{floats:.2f}")


def in_start(step: int, start: int) -> str:
    """Says that a training is in its start still, if it is."""
    return f"in the start: {step} of {start} steps" if step < start else ""


def count(n: int, unit: str) -> str:
    return f"{n} {unit}{'s' * (n != 1)}"


def times(ratio: float) -> str:
    return f"{ratio:.1f}x" if ratio < math.inf else "-"  # nothing was sent: there is no ratio


def _bytes(n: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if n < 1000 or unit == "GB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.2f} {unit}"
        n /= 1000
    raise AssertionError
