"""Session: one rank's side of the training: its memories, its step, and what it has said so far.

A step is a few conversations, one per launch, and a verdict. Memories change only in the verdict, so a step that went
wrong on any rank leaves every memory on every rank as it was.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.stage import Memory
from gradwire.core.asks import Ask, Gather, Max, Sum, Swap, Talk
from gradwire.core.keys import Key
from gradwire.core.payload import Payload
from gradwire.sync.drive import Conversation, converse
from gradwire.sync.lane import OBSERVED, Lane, Released
from gradwire.sync.memory import fresh, spans
from gradwire.sync.plan import Plan

Grads = Mapping[str, Tensor | None]

# What a rank may have to tell beside its payloads; one byte, or one added number.
BROKEN = 1  # my gradient is not finite
MISSING = 2  # some of my parameters have no gradient


class Heard(NamedTuple):
    """The outcome of one launch: what each lane would hand back, and what anybody complained of."""

    released: list[Released]
    complaints: int


class Verdict(NamedTuple):
    """The outcome of a step: updates by name. A name that nobody had a gradient for is absent."""

    updates: dict[str, Tensor]
    skipped: bool


@dataclass
class Session:
    """The mutable heart: everything else in `sync` is a value."""

    plan: Plan
    rank: int
    world: int
    seed: int
    device: torch.device

    def __post_init__(self) -> None:
        self.step = 0
        self.skipped = 0
        self.memories: list[dict[str, Tensor]] = [
            fresh(lane.slots(self.world), lane, self.rank, self.world, self.device) for lane in self.plan.lanes
        ]
        self.said: Counter[str] = Counter()  # payload bytes by lane label

    def run(self, grads: Grads, unscale: float = 1.0) -> Conversation[Verdict]:
        """A whole step: all launches in order, then the verdict. Gradients are multiplied by ``unscale`` first."""
        factor = self.clip_factor(grads, unscale)
        heard = []
        for i in range(len(self.plan.launches)):
            heard.append((yield from self.launch(i, grads, factor)))
        return (yield from self.judge(heard, grads))

    def launch(self, i: int, grads: Grads, factor: float = 1.0) -> Conversation[Heard]:
        """Compress and exchange the lanes of one launch."""
        lanes = self.plan.launches[i]
        names = [name for lane in lanes for name in lane.tensors.names]
        flats = [self._flat(lane, grads, factor) for lane in lanes]
        finite = all(bool(torch.isfinite(flat).all()) for flat in flats)
        if not finite:
            flats = [torch.zeros_like(flat) for flat in flats]  # what is said now will be dropped by all
        missing = any(grads[name] is None for name in names)
        complaint = (0 if finite else BROKEN) | (MISSING if missing else 0)
        talks = [
            self._counted(lane.label, lane.talk(flat, memory, self._key(), self.world))
            for lane, flat, memory in zip(lanes, flats, self._memories(i), strict=True)
        ]
        return (yield from self._complaining(converse(talks), complaint))

    def judge(self, heard: Sequence[Heard], grads: Grads) -> Conversation[Verdict]:
        """Commit what all launches agreed on, or drop the step whole."""
        complaints = 0
        for launch in heard:
            complaints |= launch.complaints
        used: Mapping[str, bool] | None = None
        if complaints & MISSING and not complaints & BROKEN:
            used = yield from self._used(grads)
        self.step += 1
        released = [one for launch in heard for one in launch.released]
        if complaints & BROKEN:
            self.skipped += 1
            return Verdict(self._split([torch.zeros_like(one.update) for one in released], None), True)
        self._commit([one.memory for one in released], used)
        return Verdict(self._split([one.update for one in released], used), False)

    def clip_factor(self, grads: Grads, unscale: float = 1.0) -> float:
        """``unscale``, times local clipping. That looks at the whole gradient, so it comes before any launch."""
        if not self.clips:
            return unscale
        norms = [g.detach().double().norm() for g in grads.values() if g is not None]
        norm = float(torch.stack(norms).norm()) * unscale if norms else 0.0
        return unscale * min(lane.feedback.clip_factor(norm, self.world) for lane in self.plan.lanes)

    @property
    def clips(self) -> bool:
        return any(getattr(lane.feedback, "clip", None) for lane in self.plan.lanes)

    def observe(self, moments: Mapping[str, Tensor]) -> None:
        """Add measured second moments, sum over samples of (g / batch)^2, for the variance test of the next step."""
        for lane, memory in zip(self.plan.lanes, self.memories, strict=True):
            if "second_moment" in memory:
                seen = memory.setdefault(OBSERVED, torch.zeros_like(memory["second_moment"]))
                for name, place in lane.slices.items():
                    if name in moments:
                        seen[place] += moments[name].detach().flatten().to(seen)

    # -- the parts of a step ---------------------------------------------------------------------------------------

    def _key(self) -> Key:
        return Key(self.seed, self.step, self.rank)

    def _memories(self, i: int) -> list[dict[str, Tensor]]:
        start = sum(len(launch) for launch in self.plan.launches[:i])
        return self.memories[start : start + len(self.plan.launches[i])]

    def _flat(self, lane: Lane, grads: Grads, factor: float) -> Tensor:
        parts = []
        for name, n in zip(lane.tensors.names, lane.tensors.lengths, strict=True):
            grad = grads[name]
            parts.append(
                torch.zeros(n, device=self.device) if grad is None else _dense(name, grad).to(self.device).float()
            )
        flat = torch.cat(parts)
        return flat if factor == 1.0 else flat * factor

    def _counted(self, label: str, talk: Talk[Released]) -> Talk[Released]:
        """The same talk, its payloads put on the label's account."""
        answer: Any = None
        try:
            while True:
                ask = talk.send(answer)
                self.said[label] += _nbytes(ask)
                answer = yield ask
        except StopIteration as done:
            released: Released = done.value
            return released

    def _complaining(self, talk: Conversation[list[Released]], complaint: int) -> Conversation[Heard]:
        """Let the complaint ride along with the first round, in whatever kind of message that round sends."""
        complaints = complaint
        answers: Any = None
        first = True
        try:
            while True:
                asks = talk.send(answers)
                if first:
                    heard = yield [*asks, _rider(complaint, asks, self.world)]
                    complaints |= _complaints(heard.pop())
                    answers, first = heard, False
                else:
                    answers = yield asks
        except StopIteration as done:
            return Heard(done.value, complaints)

    def _used(self, grads: Grads) -> Conversation[Mapping[str, bool]]:
        """Which parameters have a gradient on any rank at all."""
        flags = [0 if grads[name] is None else 1 for name in grads]
        (anywhere,) = yield [Max(torch.tensor(flags, dtype=torch.int32, device=self.device))]
        return dict(zip(grads, (flag > 0 for flag in anywhere.tolist()), strict=True))

    def _commit(self, memories: Sequence[Memory], used: Mapping[str, bool] | None) -> None:
        """Take over new memories, but keep the old where nobody had a gradient: that update goes nowhere."""
        for i, (lane, new) in enumerate(zip(self.plan.lanes, memories, strict=True)):
            kept = dict(new)
            if used is not None:
                for name in lane.tensors.names:
                    if not used[name]:
                        self._restore_(kept, self.memories[i], lane, name)
            self.memories[i] = kept

    def _restore_(self, kept: dict[str, Tensor], old: Memory, lane: Lane, name: str) -> None:
        for memory, slot in lane.slots(self.world).items():
            span = spans(slot, lane, self.rank, self.world)[name]
            kept[memory] = kept[memory].clone()
            kept[memory][span.live] = old[memory][span.live]

    def _split(self, updates: Sequence[Tensor], used: Mapping[str, bool] | None) -> dict[str, Tensor]:
        split = {}
        for lane, update in zip(self.plan.lanes, updates, strict=True):
            for (name, place), shape in zip(lane.slices.items(), lane.tensors.shapes, strict=True):
                if used is None or used[name]:
                    split[name] = update[place].view(shape)
        return split


def _dense(name: str, grad: Tensor) -> Tensor:
    if grad.layout != torch.strided:
        raise ValueError(
            f"the gradient of {name!r} is sparse, and only dense gradients are compressed; "
            "build its embedding with sparse=False"
        )
    return grad.detach().flatten()


def _rider(complaint: int, asks: Sequence[Ask], world: int) -> Ask:
    """The complaint, as an ask that fuses with one that is there already."""
    ask = asks[0]
    if isinstance(ask, Sum):
        loud = float("inf") if complaint & BROKEN else float(bool(complaint & MISSING))
        return Sum(ask.tensor.new_full((1,), loud))
    assert isinstance(ask, Gather | Swap)
    payload = ask.payload if isinstance(ask, Gather) else next(iter(ask.out.values()))
    byte = Payload(torch.full((1,), complaint, dtype=torch.uint8, device=payload.data.device))
    if isinstance(ask, Gather):
        return Gather(byte, 1)
    return Swap({rank: byte for rank in range(world)}, dict.fromkeys(range(world), 1))


def _complaints(answer: Any) -> int:
    if isinstance(answer, Tensor):
        loud = float(answer)
        return 0 if loud == 0.0 else MISSING if loud < float("inf") else BROKEN
    payloads = answer.values() if isinstance(answer, Mapping) else answer
    complaints = 0
    for payload in payloads:
        complaints |= int(payload.data[0])
    return complaints


def _nbytes(ask: Ask) -> int:
    if isinstance(ask, Gather):
        return ask.payload.nbytes
    if isinstance(ask, Swap):
        return sum(payload.nbytes for payload in ask.out.values())
    return ask.tensor.numel() * ask.tensor.element_size()
