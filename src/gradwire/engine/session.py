"""Session: one rank's side of the training: its memories, its step, and what it has said so far.

A step is a few conversations, one per launch, and a verdict. Memories change only in the verdict, so a step that went
wrong on any rank leaves every memory on every rank as it was.

A session may run ahead of its device. Then nobody looks at what the device finds: it undoes a step by itself, and what
became of it is known in hindsight.

Without rollback, fused kernels change memories where they lie, and need half the room. Then a step cannot be undone,
and a bad gradient is an error.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from gradwire.codecs.codec import Entries
from gradwire.codecs.stage import Memory, StateSpec
from gradwire.core.keys import Key, StillKey
from gradwire.core.requests import CommGenerator, Gather, Max, Request, SendRecv
from gradwire.engine.complaint import BROKEN, MISSING, UNFIT, any_of, byte, complaints_in, dropped_in, rider
from gradwire.engine.direct import Laid, laid, talk
from gradwire.engine.drive import Clock, Conversation, converse
from gradwire.engine.hindsight import IRREVOCABLE, Hindsight
from gradwire.engine.lane import OBSERVED, OWED, Lane, Released
from gradwire.engine.memory import fresh, spans
from gradwire.engine.plan import Plan
from gradwire.kernels.overrule import restore_, void_

T = TypeVar("T")
Grads = Mapping[str, Tensor | None]


class Heard(NamedTuple):
    """The outcome of one launch: what each lane would hand back, and what anybody complained of."""

    released: list[Released]
    complaints: int
    aside: Any = None  # what a session of several ranks on a host has to remember of the launch
    dropped: Tensor | None = None  # where nobody looks: whether anybody complained, as the device knows


class Places(NamedTuple):
    """Where the gradients of a launch lie, lane by lane, as flat vectors; and whether all are float32."""

    lanes: Sequence[Sequence[Tensor]]
    exact: bool


class Verdict(NamedTuple):
    """The outcome of a step: updates by name. A name that nobody had a gradient for is absent."""

    updates: dict[str, Tensor]
    skipped: bool | None  # None: nobody has looked


@dataclass
class Session:
    """The mutable heart: everything else in `sync` is a value.

    Attributes:
        rollback: Whether memories of before a step are kept until it is agreed on. Where no kernel is fused, they are.
        ahead: Whether nobody looks at the device in this step. Only where every rank has all its gradients.
        doubts: What may have been wrong with messages of this step, where nobody looked.
    """

    plan: Plan
    rank: int
    world: int
    seed: int
    device: torch.device
    rollback: bool = True

    local, beside = 0, 1  # where several ranks on a host share the work: which of how many this is

    def __post_init__(self) -> None:
        self.rollback = self.rollback or not any(lane.fused for lane in self.whole.lanes)
        self.step = 0
        self.ahead = False
        self._repeats = False
        self._spoiled = ""  # why no further step can be taken
        self.doubts: list[Tensor] = []
        self._skipped = 0
        self._hindsight = Hindsight(self.device, forgives=self.rollback)
        self._donated = False
        self.memories: list[dict[str, Tensor]] = [
            fresh(lane.slots(self.world), lane, self.rank, self.world, self.device) for lane in self.plan.lanes
        ]
        self._slots = [tuple(lane.slots(self.world)) for lane in self.plan.lanes]
        self.spent: defaultdict[str, Clock] = defaultdict(Clock)  # seconds by lane label; the wire is everybody's
        self.said: Counter[str] = Counter()  # payload bytes by lane label
        self.meant: Counter[str] = Counter()  # bytes of the same gradients in float32

    def run(self, grads: Grads, unscale: float = 1.0) -> Conversation[Verdict]:
        """A whole step: all launches in order, then the verdict. Gradients are multiplied by ``unscale`` first."""
        factor = self.clip_factor(grads, unscale)
        if self.clips:
            self._shrink_observed(factor / unscale)
        home = self._home(grads) if factor == 1.0 else None
        heard = []
        for i in range(len(self.plan.launches)):
            launch = self.launch(i, grads, factor) if home is None else self.launch(i, grads, places=home[i])
            heard.append((yield from launch))
        return (yield from self.judge(heard, grads))

    def launch(
        self,
        i: int,
        grads: Grads,
        factor: float = 1.0,
        told: int = 0,
        places: Places | None = None,
        room: Sequence[Memory] = (),
    ) -> Conversation[Heard]:
        """Compress and exchange the lanes of one launch.

        Args:
            i: Which.
            grads: By name.
            factor: What gradients are multiplied by first.
            told: Complaints to pass on.
            places: Where the same gradients lie, if somebody has that at hand. What is agreed on is written there.
            room: Memories of each lane that nobody needs any more; new ones may go there.
        """
        self.check_sound()
        lanes = self.plan.launches[i]
        complaint = told if self.ahead else told | self._complaint(i, grads)
        if complaint & (BROKEN | UNFIT):  # what is said now will be dropped by all
            flats: list[Tensor | Laid] = [torch.zeros(lane.units.total, device=self.device) for lane in lanes]
        else:
            memories = self.memories_of(i)
            flats = [joined(one) for one in places.lanes] if places is not None and places.exact else []
            flats = flats or [self._vector(lane, grads, m, factor) for lane, m in zip(lanes, memories, strict=True)]
        for lane in lanes:
            self.meant[lane.label] += 4 * lane.units.total
        broken: list[Tensor] = []
        rooms = (room or [{}] * len(lanes)) if self.rollback else self.memories_of(i)
        talks = [
            self._counted(lane.label, self._talk(lane, flat, memory, broken, free, apart=places is not None))
            for lane, flat, memory, free in zip(lanes, flats, self.memories_of(i), rooms, strict=True)
        ]
        heard = yield from self._complaining(converse(talks), complaint, broken)
        return heard if places is None else _delivered(heard, lanes, flats, places)

    def judge(self, heard: Sequence[Heard], grads: Grads) -> Conversation[Verdict]:
        """Commit what all launches agreed on, or drop the step whole."""
        complaints = 0
        for launch in heard:
            complaints |= launch.complaints
        released = [one for launch in heard for one in launch.released]
        if self.ahead and any(one.update is None for one in released):  # it lies where the gradients were
            lying = {name: grad for name, grad in grads.items() if grad is not None}
            self.overrule_(heard, [grad.view(-1) for grad in lying.values()])
            self.adopt(heard)
            return Verdict(lying, None)
        if self.ahead:
            return Verdict(self.split(self.trust(heard)), None)
        if complaints & UNFIT:
            raise ValueError(_refusal(grads))
        if complaints & BROKEN:
            self.forgive()
            self.skip()
            return Verdict(self.split([_zeros(one.update) for one in released], None), True)
        used = (yield from self._used(grads)) if complaints & MISSING else None
        self._check_used(used or {})
        self.step += 1
        self._commit([one.memory for one in released], used)
        return Verdict(self.split([one.update for one in released], used), False)

    def trust(self, heard: Sequence[Heard]) -> list[Tensor | Laid]:
        """Commit as if all were well, and give each lane's update. If it is not, the device puts everything back."""
        memories = {x.data_ptr() for pair in self._changed(heard) for x in pair}
        updates = _voided([one.update for launch in heard for one in launch.released], memories, _dropped(heard))
        self.overrule_(heard, ())
        self.adopt(heard)
        return updates

    def overrule_(self, heard: Sequence[Heard], written: Sequence[Tensor]) -> None:
        """Have the device see to a step that was dropped, and count it.

        Old memories then go where the new ones are, and zeros where something was written.
        """
        dropped, changed = _dropped(heard), self._changed(heard)
        void_(dropped, written)
        restore_(dropped, [now for now, _ in changed], [before for _, before in changed])
        if self.device.type == "cuda":
            for _, before in changed:  # the first ones were made beside this stream, which may still read them
                before.record_stream(torch.cuda.current_stream(self.device))
        self._hindsight.count_(dropped, self.doubts)

    def adopt(self, heard: Sequence[Heard]) -> None:
        """Commit what was heard, all being well as far as anybody here knows."""
        self.memories = [dict(one.memory) for launch in heard for one in launch.released]
        self.step += 1
        self.doubts = []
        self._hindsight.look()

    @contextmanager
    def repeatable(self) -> Iterator[None]:
        """Until the end, nothing may be drawn for this step: what is said will be said again in others."""
        self._repeats = True
        try:
            yield
        finally:
            self._repeats = False

    @property
    def may_lead(self) -> bool:
        """Whether the device can put back all that there is: nothing is owed or observed that a step uses up."""
        return not any(OWED in memory or OBSERVED in memory for memory in self.memories)

    @property
    def skipped(self) -> int:
        """Steps that were dropped. Where nobody looked at them, whoever asks waits."""
        return self._skipped + self._hindsight.dropped

    @skipped.setter
    def skipped(self, steps: int) -> None:
        self._skipped = steps - self._hindsight.dropped

    def begin_anew(self) -> None:
        """Memories have been replaced by those of a checkpoint."""
        self._spoiled = ""
        self._hindsight.begin_anew()

    def look_back(self) -> None:
        """Wait for all steps, and make sure that memories are sound.

        Raises:
            RuntimeError: A step was to be dropped, and could not be.
        """
        self.check_sound()
        self._hindsight.check()

    def check_sound(self) -> None:
        """Make sure that a step may be taken.

        Raises:
            RuntimeError: An earlier one was to be dropped, and could not be.
        """
        if self._spoiled:
            raise RuntimeError(self._spoiled)

    def _spoil(self, why: str) -> None:
        """Raise an error, now and until other memories are loaded."""
        self._spoiled = why
        self.check_sound()

    def donate(self) -> None:
        """From now on, gradients may be overwritten by what is agreed on."""
        self._donated = True

    def forgive(self) -> None:
        """Make sure that a step can be dropped.

        Raises:
            RuntimeError: Memories have been changed already.
        """
        if not self.rollback:
            self._spoil(IRREVOCABLE)

    def skip(self) -> None:
        """Count a step that was dropped, and forget what the loop observed in it."""
        self.step += 1
        self._skipped += 1
        for memory in self.memories:
            memory.pop(OBSERVED, None)

    def clip_factor(self, grads: Grads, unscale: float = 1.0) -> float:
        """``unscale``, times local clipping. That looks at the whole gradient, so it comes before any launch."""
        if not self.clips:
            return unscale
        norms = [g.detach().double().norm() for g in grads.values() if g is not None]
        norm = float(torch.stack(norms).norm()) * unscale if norms else 0.0
        return unscale * min(lane.feedback.clip_factor(norm, self.world) for lane in self.whole.lanes)

    def _shrink_observed(self, factor: float) -> None:
        """Clip what the loop observed as the gradients are that it is held against."""
        for memory in self.memories:
            if OBSERVED in memory:
                memory[OBSERVED] = memory[OBSERVED] * factor**2

    @property
    def clips(self) -> bool:
        return any(getattr(lane.feedback, "clip", None) for lane in self.whole.lanes)

    @property
    def whole(self) -> Plan:
        """The plan of all parameters, whoever serves them."""
        return self.plan

    @property
    def pending(self) -> dict[str, Tensor]:
        """What the last step agreed on, by name, to be handed back one step late; the memories themselves."""
        held = [pair for pair in zip(self.plan.lanes, self.memories, strict=True) if "pending" in pair[1]]
        return {name: memory["pending"][place] for lane, memory in held for name, place in lane.slices.items()}

    @property
    def facts(self) -> dict[str, Tensor]:
        """What a saved state must hold beside memories."""
        return {}

    def recall(self, state: Memory) -> None:
        """Take over what the facts of a saved state say."""

    def observe(self, moments: Mapping[str, Tensor]) -> None:
        """Add measured second moments, sum over samples of (g / batch)^2, for the variance test of the next step."""
        self._check_moments(moments)
        for lane, memory in zip(self.plan.lanes, self.memories, strict=True):
            if "second_moment" in memory:
                seen = memory.setdefault(OBSERVED, torch.zeros_like(memory["second_moment"]))
                for name, place in lane.slices.items():
                    if name in moments:
                        seen[place] += moments[name].detach().flatten().to(seen)

    def _check_moments(self, moments: Mapping[str, Tensor]) -> None:
        lanes = self.whole.lanes
        sizes = {name: n for lane in lanes for name, n in zip(lane.slices, lane.tensors.lengths, strict=True)}
        for name, moment in moments.items():
            if sizes.get(name) != moment.numel():
                raise ValueError(
                    f"second moments of {name!r} with {moment.numel()} elements fit no parameter; pass one tensor for "
                    "each name of model.named_parameters(), in the parameter's shape"
                )

    # -- the parts of a step ---------------------------------------------------------------------------------------

    def _key(self) -> Key:
        return (StillKey if self._repeats else Key)(self.seed, self.step, self.rank)

    def _changed(self, heard: Sequence[Heard]) -> list[tuple[Tensor, Tensor]]:
        """The memories that a step replaces, each with what it was."""
        released = [one for launch in heard for one in launch.released]
        return [
            (one.memory[name], old[name])
            for one, old, slots in zip(released, self.memories, self._slots, strict=True)
            for name in slots
            if name in one.memory and one.memory[name] is not old[name]
        ]

    def memories_of(self, i: int) -> list[dict[str, Tensor]]:
        """What the lanes of one launch remember."""
        start = sum(len(launch) for launch in self.plan.launches[:i])
        return self.memories[start : start + len(self.plan.launches[i])]

    def _vector(self, lane: Lane, grads: Grads, memory: Memory, factor: float) -> Tensor | Laid:
        """The gradients of a lane: where they lie, if they may be left there, else end to end."""
        near = self.device.type == "cpu" and factor == 1.0
        lies = laid(lane, grads, memory, self._key(), self.world) if near and self._donated else None
        if lies is not None:
            return lies
        narrow = near and lane.lowered(memory, self._key(), self.world)  # a fused kernel widens as it goes
        return self.flat(lane, grads, factor, _width(lane, grads) if narrow else torch.float32)

    def _home(self, grads: Grads) -> list[Places] | None:
        """Where gradients lie, launch by launch, if what is agreed on may be written there before all is known."""
        fit = self.ahead and self._donated and all(self._is_plain(grad) for grad in grads.values())
        if not fit:
            return None
        lanes = [[[grads[name] for name in lane.tensors.names] for lane in launch] for launch in self.plan.launches]
        return [Places([[g.view(-1) for g in one if g is not None] for one in launch], True) for launch in lanes]

    def _is_plain(self, grad: Tensor | None) -> bool:
        """Whether a gradient can be read and overwritten as the flat vector that it is."""
        if grad is None or _is_sparse(grad) or grad.requires_grad:
            return False
        return grad.is_contiguous() and grad.dtype == torch.float32 and grad.device == self.device

    def flat(self, lane: Lane, grads: Grads, factor: float, dtype: torch.dtype = torch.float32) -> Tensor:
        """A lane's gradients end to end."""
        parts = []
        for name, n in zip(lane.tensors.names, lane.tensors.lengths, strict=True):
            grad = grads[name]
            if grad is None or _is_sparse(grad):
                parts.append(torch.zeros(n, dtype=dtype, device=self.device))
            else:
                parts.append(self._part(grad, dtype))
        flat = joined(parts)
        return flat if factor == 1.0 else flat * factor

    def _part(self, grad: Tensor, dtype: torch.dtype) -> Tensor:
        part = grad.reshape(-1)
        if grad.requires_grad or grad.dtype != dtype or grad.device != self.device:
            part = part.detach().to(self.device, dtype)
        return part

    def _complaint(self, i: int, grads: Grads) -> int:
        mine = [grads[name] for lane in self.plan.launches[i] for name in lane.tensors.names]
        return (MISSING if any(grad is None for grad in mine) else 0) | (
            UNFIT if any(grad is not None and _is_sparse(grad) for grad in mine) else 0
        )

    def _talk(
        self, lane: Lane, flat: Tensor | Laid, memory: Memory, broken: list[Tensor], room: Memory, apart: bool
    ) -> CommGenerator[Released]:
        if isinstance(flat, Laid):
            return talk(lane, flat, memory, self._key(), self.world, broken, self.rollback)
        if lane.lowered(memory, self._key(), self.world):  # a fused kernel looks for itself
            return lane.talk_fused(flat, memory, self._key(), self.world, broken, room, apart)
        flat, unfit = censored(flat)
        broken.append(unfit)
        return lane.talk(flat, memory, self._key(), self.world, apart)

    def _counted(self, label: str, talk: CommGenerator[Released]) -> CommGenerator[Released]:
        """The same talk, its payloads and its time put on the label's account."""
        answer: Any = None
        spoken = False
        began = time.perf_counter()
        try:
            while True:
                ask = talk.send(answer)
                self.spent[label].work(time.perf_counter() - began, spoken)
                self.said[label] += nbytes(ask)
                answer = yield ask
                began, spoken = time.perf_counter(), True
        except StopIteration as done:
            self.spent[label].work(time.perf_counter() - began, spoken=True)
            released: Released = done.value
            return released

    def _complaining(
        self, talk: Conversation[list[Released]], complaint: int, broken: Sequence[Tensor]
    ) -> Conversation[Heard]:
        """Let the complaint ride along with the first round, in whatever kind of message that round sends."""
        try:
            asks = next(talk)
        except StopIteration as done:  # nobody had anything to ask
            mine = byte(complaint, broken, self.device)
            (said,) = [[mine]] if self._silent else (yield [Gather(mine, 1)])
            return self._heard(done.value, complaint, said)
        *answers, said = yield [*asks, rider(complaint, broken, asks[0], self.world, self.device)]
        released = yield from _resume(talk, answers)
        return self._heard(released, complaint, said)

    def _heard(self, released: list[Released], complaint: int, said: Any) -> Heard:
        if self.ahead:
            return Heard(released, 0, dropped=dropped_in(said))
        return Heard(released, complaint | complaints_in(said))

    @property
    def _silent(self) -> bool:
        """Whether ranks never hear of each other at all."""
        return all(lane.at(self.step)[1].silent for lane in self.whole.lanes)

    def _used(self, grads: Grads) -> Conversation[Mapping[str, bool]]:
        """Which parameters have a gradient on any rank at all."""
        flags = [0 if grads[name] is None else 1 for name in grads]
        if self._silent:
            return dict(zip(grads, map(bool, flags), strict=True))
        (anywhere,) = yield [Max(torch.tensor(flags, dtype=torch.int32, device=self.device))]
        return dict(zip(grads, (flag > 0 for flag in anywhere.tolist()), strict=True))

    def _check_used(self, used: Mapping[str, bool]) -> None:
        changed = () if self.rollback else (lane for lane in self.whole.lanes if lane.fused)
        idle = [name for lane in changed for name in lane.tensors.names if not used.get(name, True)]
        if idle:
            self._spoil(
                f"no rank had a gradient of {idle[0]!r}, whose memories had been changed already (rollback=False); go "
                "back to the last checkpoint, and freeze what is not trained, or attach with rollback=True"
            )

    def _commit(self, memories: Sequence[Memory], used: Mapping[str, bool] | None) -> None:
        """Take over new memories, but keep the old where nobody had a gradient: that update goes nowhere."""
        for i, (lane, new) in enumerate(zip(self.plan.lanes, memories, strict=True)):
            kept = dict(new)
            for name in lane.tensors.names:
                if used is not None and not used[name]:
                    self._restore_(kept, self.memories[i], lane, name)
            self.memories[i] = kept

    def _restore_(self, kept: dict[str, Tensor], old: Memory, lane: Lane, name: str) -> None:
        slots = lane.slots(self.world)
        if OWED in old:
            slots[OWED] = StateSpec(lane.tensors.lengths)
        for memory, slot in slots.items():
            span = spans(slot, lane, self.rank, self.world)[name]
            kept[memory] = kept[memory].clone() if memory in kept else torch.zeros_like(old[memory])
            kept[memory][span.live] = old[memory][span.live]

    def split(self, updates: Sequence[Tensor | Laid], used: Mapping[str, bool] | None = None) -> dict[str, Tensor]:
        """What the lanes hand back, by name."""
        split = {}
        for lane, update in zip(self.plan.lanes, updates, strict=True):
            flats = update.parts if isinstance(update, Laid) else update.split(lane.tensors.lengths)
            for name, flat, shape in zip(lane.tensors.names, flats, lane.tensors.shapes, strict=True):
                if used is None or used[name]:
                    split[name] = flat.view(shape)
        return split


def _dropped(heard: Sequence[Heard]) -> Tensor:
    """Whether anybody complained of any launch, as the device knows."""
    return any_of([launch.dropped for launch in heard if launch.dropped is not None])


def _delivered(heard: Heard, lanes: Sequence[Lane], flats: Sequence[Tensor | Laid], places: Places) -> Heard:
    """The same, with updates written to where gradients were, which they need not outlive; memories are kept.

    Few entries are written over the vector that was encoded. That may be where gradients lie.
    """
    for lane, flat, place, one in zip(lanes, flats, places.lanes, heard.released, strict=True):
        assert isinstance(flat, Tensor)
        update = one.update.mean_(flat.float()) if isinstance(one.update, Entries) else one.update
        if update.data_ptr() != place[0].data_ptr():
            torch._foreach_copy_(list(place), update.split(lane.tensors.lengths))
    return heard._replace(released=[one._replace(update=None) for one in heard.released])


def _zeros(update: Tensor | Laid) -> Tensor | Laid:
    return update.zero_() if isinstance(update, Laid) else torch.zeros_like(update)


def _voided(updates: Sequence[Tensor | Laid], memories: Set[int], dropped: Tensor) -> list[Tensor | Laid]:
    """The updates, or zeros if the step was dropped; a memory that is handed out, known by its place, stays."""
    found, parts = list[Tensor | Laid](), list[Tensor]()
    for update in updates:
        if isinstance(update, Laid):
            parts += update.parts
        elif update.data_ptr() in memories:
            update = torch.where(dropped, 0.0, update)
        else:
            parts.append(update)
        found.append(update)
    void_(dropped, parts)
    return found


def _width(lane: Lane, grads: Grads) -> torch.dtype:
    """The type of 16 bits that all gradients of a lane have, else float32."""
    found = {grad.dtype for name in lane.tensors.names if (grad := grads[name]) is not None}
    only = found.pop() if len(found) == 1 else torch.float32
    return only if only in (torch.float16, torch.bfloat16) else torch.float32


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The parts end to end: a view, where that is how they lie in memory already."""
    first, at = parts[0], parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != at:
            return torch.cat(list(parts))
        at += part.nbytes
    begin, n = first.storage_offset(), sum(part.numel() for part in parts)
    inside = first.element_size() * (begin + n) <= first.untyped_storage().nbytes()
    return first.as_strided((n,), (1,)) if inside else torch.cat(list(parts))


def censored(flat: Tensor, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """The gradients of so many ranks, with zeros for each that has anything not finite; and whether there was one.

    What is said then will be dropped by all.
    """
    if flat.device.type == "cpu" and torch.isfinite(flat.sum()):  # then all are, which is dear to see one by one
        return flat, torch.tensor(False)
    rows = flat.view(ranks, -1)
    fine = torch.isfinite(rows).all(1)
    broken = ~fine.all()
    if flat.device.type == "cpu" and not broken:  # elsewhere, looking would mean waiting
        return flat, broken
    return torch.where(fine[:, None], rows, 0.0).view(-1), broken


def _is_sparse(grad: Tensor) -> bool:
    return grad.layout != torch.strided


def _refusal(grads: Grads) -> str:
    remedy = "only dense gradients are compressed; build embeddings with sparse=False"
    for name, grad in grads.items():
        if grad is not None and _is_sparse(grad):
            return f"the gradient of {name!r} is sparse, and {remedy}"
    return f"another rank has a sparse gradient, and {remedy}"


def _resume(talk: Conversation[T], answers: list[Any]) -> Conversation[T]:
    """The rest of a conversation whose first round has been answered."""
    try:
        while True:
            answers = yield talk.send(answers)
    except StopIteration as done:
        result: T = done.value
        return result


def nbytes(ask: Request) -> int:
    """What an ask says, in bytes."""
    if isinstance(ask, Gather):
        return ask.payload.nbytes
    if isinstance(ask, SendRecv):
        return sum(payload.nbytes for payload in ask.out.values())
    return ask.tensor.numel() * ask.tensor.element_size()
