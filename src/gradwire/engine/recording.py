"""Recording: what is the same at every step is said to the device once, and repeated.

A host spends milliseconds on the fifty kernels and hundred small tensors of a step, where a GPU takes a whole list of
them, a CUDA graph, in microseconds. A recording has the graphs of a launch, and between them the collectives, which are
no part of any graph: it is nobody else's business which rank repeats, and which still speaks.

A graph knows addresses, not names. Gradients come where they came before, in DDP's buckets. Memories have two
generations, because a step may be dropped; so there are two takes of each launch, one from the first generation to the
second, and one back. Where memories are changed in place, one take leads back to where it began. A take serves only
where it finds the very tensors that it was made with. A checkpoint, or another spec, may bring others: then steps are
spoken again for a while, and recorded anew.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from gradwire.codecs.stage import Memory
from gradwire.comm.backend import Backend
from gradwire.comm.collectives import Collective, fuse
from gradwire.core.deferred_checks import unseen
from gradwire.core.graph_refs import keeping
from gradwire.core.keys import Drawn
from gradwire.engine.drive import Clock, Conversation
from gradwire.engine.session import Grads, Heard, Places, Session

T = TypeVar("T")
Talking = Generator[Collective, Tensor, T]

_SPOKEN = 3  # steps before anything is recorded: kernels are compiled, hints are there
_TRIES = 4  # recordings that did not last, after which a launch is spoken for good
_LASTING = 100  # repeats that make up for having recorded
_log = logging.getLogger("gradwire")


# -- graphs ------------------------------------------------------------------------------------------------------------


class Graph(Protocol):
    """Work of a device that can be written down, and done as often as one likes."""

    def writing(self) -> AbstractContextManager[None]:
        """Until the end, work is written down, and not done."""

    def run(self) -> None:
        """Do it, on the current stream."""


class CudaGraphs:
    """Makes graphs that share one pool of memory: what one of them has freed, those written later use.

    Nothing in there may outlive a launch, since graphs do not run in the order in which they were written: a launch
    with one take runs between the two takes of another, and writes over whatever that one has left there.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.written: WeakSet[CudaGraph] = WeakSet()
        self._pool: Any = None

    def __call__(self) -> "CudaGraph":
        if not self.written:  # torch closes a pool with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        return CudaGraph(self, self._pool)


class CudaGraph:
    """Torch's own."""

    def __init__(self, family: CudaGraphs, pool: Any) -> None:
        self._family, self._pool = family, pool
        self._graph = torch.cuda.CUDAGraph()

    @contextmanager
    def writing(self) -> Iterator[None]:
        # Other threads, NCCL's among them, go on calling the driver meanwhile.
        self._graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            self._end()
        self._family.written.add(self)

    def run(self) -> None:
        self._graph.replay()

    def _end(self) -> None:
        try:
            self._graph.capture_end()
        except RuntimeError:  # something was not allowed
            _sober_up(self._family.device, self._pool)
            raise


def _sober_up(device: torch.device, pool: Any) -> None:
    """Make torch see that a capture has ended that did not end well.

    Its allocator would take it to go on forever; and so would its generator, which then refuses to draw anything, until
    some other capture has ended as it should.
    """
    torch._C._cuda_endAllocateToPool(device.index, pool)
    other = torch.cuda.CUDAGraph()
    other.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device=device)
    other.capture_end()


def graphs_on(device: torch.device) -> Callable[[], Graph] | None:
    """What makes graphs for a device; None where there are none, or where ``GRADWIRE_GRAPHS=0``."""
    return CudaGraphs(device) if device.type == "cuda" and os.environ.get("GRADWIRE_GRAPHS") != "0" else None


# -- one conversation --------------------------------------------------------------------------------------------------


class Turn(NamedTuple):
    """Some work, and the collective after it, with the memory that its result was written to."""

    graph: Graph
    collective: Collective | None
    heard: Tensor | None


class Unrecordable(Exception):
    """A conversation cannot be written down.

    Attributes:
        heard: The results of those collectives that have been carried out.
        never: Whether there is no use in trying again.
    """

    def __init__(self, heard: Sequence[Tensor], never: bool) -> None:
        self.heard, self.never = heard, never


@dataclass
class Tape(Generic[T]):
    """A conversation, written down; and its outcome, whose tensors every repeat fills anew."""

    turns: list[Turn]
    outcome: T
    kept: list[Any]  # what graphs point at

    def repeat(self, link: Backend, clock: Clock) -> T:
        """Hold it once more."""
        began, spoken = time.perf_counter(), False
        for graph, collective, heard in self.turns:
            graph.run()
            done = time.perf_counter()
            clock.work(done - began, spoken)
            began = done
            if collective is not None and heard is not None:
                link.again(collective, heard)
                began, spoken = time.perf_counter(), True
                clock.wire += began - done
        return self.outcome


def record(talking: Talking[T], link: Backend, graphs: Callable[[], Graph]) -> Tape[T]:
    """Hold a conversation, and write it down.

    Raises:
        Unrecordable: It cannot be; the rest has not been held.
    """
    turns: list[Turn] = []
    heard: Any = None
    with keeping() as kept:
        while True:
            graph, done = graphs(), list[T]()
            try:
                with graph.writing():
                    collective = _next(talking, heard, done)
            except Exception as wrong:  # if it is wrong in itself, it will be so when spoken, too
                known = [turn.heard for turn in turns if turn.heard is not None]
                raise Unrecordable(known, isinstance(wrong, Drawn)) from wrong
            graph.run()
            heard = None if collective is None else link.run(collective)
            turns.append(Turn(graph, collective, heard))
            if done:
                return Tape(turns, done[0], kept)


def hold(talking: Talking[T], link: Backend, known: Sequence[Tensor] = ()) -> T:
    """Hold a conversation the results of whose first collectives are known."""
    before, heard, done = iter(known), None, list[T]()
    while True:
        collective = _next(talking, heard, done)
        if collective is None:
            return done[0]
        heard = next(before, None)
        heard = link.run(collective) if heard is None else heard


def _next(talking: Talking[T], heard: Any, done: list[T]) -> Collective | None:
    """The next collective that a conversation wants; if none, ``done`` gets its outcome."""
    try:
        return talking.send(heard)
    except StopIteration as stop:
        done.append(stop.value)
        return None


def in_collectives(conversation: Conversation[T], world: int) -> Talking[T]:
    """A conversation in what links carry out."""
    answers: Any = None
    try:
        while True:
            answers = yield from fuse(conversation.send(answers), world)
    except StopIteration as stop:
        outcome: T = stop.value
        return outcome


# -- a session's launches ----------------------------------------------------------------------------------------------


@dataclass
class Take:
    """One launch from one generation of memories to the next, and what it adds to the session's account."""

    tape: Tape[Heard]
    before: Sequence[Memory]
    how: list[Any]  # the codecs and exchanges of the step
    doubts: list[Tensor]
    said: Counter[str]
    meant: Counter[str]

    @property
    def after(self) -> Sequence[Memory]:
        return [one.memory for one in self.tape.outcome.released]


@dataclass(frozen=True)
class Outside:
    """Where that goes which outlives a recorded launch: not to memory that graphs share.

    Attributes:
        held: Memories of before, lane by lane. Those that stay as they are stay where they are.
        room: For new ones: it may be the same. It may lack a hint, which may be lost without harm.
        dropped: Whether anybody complained.
        damaged: Whether there were doubts.
    """

    held: Sequence[Memory]
    room: Sequence[Memory]
    dropped: Tensor
    damaged: Tensor

    def left_by(self, conversation: Conversation[Heard], doubts: list[Tensor]) -> Conversation[Heard]:
        """The same, with its outcome and its doubts here."""
        heard = yield from conversation
        assert heard.dropped is not None  # the session never looks
        if doubts:
            doubts[:] = [self.damaged.copy_(torch.cat([doubt.flatten() for doubt in doubts]).any())]
        lanes = zip(heard.released, self.held, self.room, strict=True)
        released = [one._replace(memory=_moved(one.memory, old, new)) for one, old, new in lanes]
        return heard._replace(released=released, dropped=self.dropped.copy_(heard.dropped))


def _like(memory: Memory) -> dict[str, Tensor]:
    return {name: torch.empty_like(x) for name, x in memory.items()}


def _moved(memory: Memory, held: Memory, room: Memory) -> dict[str, Tensor]:
    there = {name for name, x in memory.items() if x is held.get(name) or room.get(name, x) is x}
    return {name: x if name in there else room[name].copy_(x) for name, x in memory.items()}


@contextmanager
def _put_back(held: Sequence[Memory]) -> Iterator[None]:
    """Until the end, memories are changed in place. If that cannot be recorded, it will be done again: undo it."""
    try:
        before = [(x, x.clone()) for memory in held for x in memory.values()]
    except torch.OutOfMemoryError as wrong:  # there is room for the training only
        raise Unrecordable([], never=False) from wrong
    try:
        yield
    except Unrecordable:
        for now, was in before:
            now.copy_(was)
        raise


@dataclass
class Part:
    """What is known of one launch."""

    takes: list[Take] = field(default_factory=list)
    spoken: int = 0
    repeated: int = 0
    tries: int = _TRIES

    def fitting(self, held: Sequence[Memory], how: list[Any]) -> Take | None:
        """The take that begins with these memories."""
        for take in self.takes:
            if take.how == how and _same(take.before, held):
                return take
        return None

    def due(self, held: Sequence[Memory], how: list[Any]) -> bool:
        """Whether it is time to record. Takes that these memories have left behind are forgotten."""
        if self.takes and not (len(self.takes) == 1 and self.takes[0].how == how and _same(self.takes[0].after, held)):
            self.forget()
        return bool(self.takes) or (self.spoken >= _SPOKEN and self.tries > 0)

    def refuse(self, wrong: Unrecordable) -> None:
        """Speak on. What is drawn is drawn at every step; anything else may be better luck next time."""
        self.forget()
        self.tries = 0 if wrong.never else self.tries - 1
        if not wrong.never:
            _log.warning("gradwire: a launch could not be recorded (%s); it goes on unrecorded", wrong.__cause__)

    def forget(self) -> None:
        self.tries = _TRIES if self.repeated > _LASTING else self.tries - bool(self.takes)
        self.takes.clear()
        self.spoken = self.repeated = 0


class Recorder:
    """Runs the launches of a session that never looks at its device, and records them as soon as it can.

    A launch without memories has one take, and so has any where they are changed in place; all others have two.

    Args:
        session: Whose.
        link: Who carries out collectives.
        clock: Where time is noted.
        speak: Holds a conversation that is not recorded.
        graphs: Makes a graph; None: nothing is ever recorded.
    """

    def __init__(
        self,
        session: Session,
        link: Backend,
        clock: Clock,
        speak: Callable[[Conversation[Heard]], Heard],
        graphs: Callable[[], Graph] | None,
    ) -> None:
        self.session, self._link, self._clock, self._speak, self._graphs = session, link, clock, speak, graphs
        self._parts = [Part() for _ in session.plan.launches]
        self._verdicts: dict[tuple[int, ...], Tape[None] | None] = {}  # by what was heard; None: it cannot be recorded

    def launch(self, i: int, grads: Grads, places: Places) -> Heard:
        """Compress and exchange one launch, and write the outcome to its places."""
        session, part = self.session, self._parts[i]
        session.check_sound()
        if self._graphs is None:
            return self._speak(session.launch(i, grads, places=places))
        held, how = session.memories_of(i), [lane.at(session.step) for lane in session.plan.launches[i]]
        take = part.fitting(held, how)
        if take is not None:
            part.repeated += 1
            return self._repeat(i, take)
        if part.due(held, how):
            return self._record(i, grads, places, held, how)
        part.spoken += 1
        return self._speak(session.launch(i, grads, places=places))

    def conclude(self, heard: Sequence[Heard], written: Sequence[Tensor]) -> None:
        """Commit the launches of a step, as if all were well; if not, the device puts everything back."""
        key = tuple(map(id, heard))
        if not self._lasting.issuperset(key):
            self._verdicts.clear()
            self.session.overrule_(heard, written)
        elif key not in self._verdicts:
            self._verdicts[key] = self._record_verdict(heard, written)
        elif (tape := self._verdicts[key]) is not None:
            tape.repeat(self._link, Clock())
        else:
            self.session.overrule_(heard, written)
        self.session.adopt(heard)

    def forget(self) -> None:
        """Speak again, and record anew: gradients come elsewhere from now on."""
        for part in self._parts:
            part.forget()
        self._verdicts.clear()

    @property
    def _lasting(self) -> set[int]:
        """What is heard in the same tensors again and again, by identity."""
        return {id(take.tape.outcome) for part in self._parts for take in part.takes}

    def _repeat(self, i: int, take: Take) -> Heard:
        session, clock = self.session, Clock()
        heard = take.tape.repeat(self._link, clock)
        self._clock.add(clock)
        session.doubts += take.doubts
        for label in take.meant:
            session.said[label] += take.said[label]
            session.meant[label] += take.meant[label]
        lanes = session.plan.launches[i]
        total = sum(lane.units.total for lane in lanes)
        for lane in lanes:  # of one graph nobody can say whose time it took, but by size
            session.spent[lane.label].add(clock, lane.units.total / max(total, 1), wire=False)
        return heard

    def _record(self, i: int, grads: Grads, places: Places, held: Sequence[Memory], how: list[Any]) -> Heard:
        assert self._graphs is not None
        session, part = self.session, self._parts[i]
        room = held
        if session.rollback:
            room = part.takes[0].before if part.takes else [_like(memory) for memory in held]
        outside = Outside(
            held,
            room,
            torch.zeros((), dtype=torch.bool, device=session.device),
            torch.zeros((), dtype=torch.bool, device=session.device),
        )
        said, meant = session.said.copy(), session.meant.copy()

        def again() -> Talking[Heard]:
            talk = session.launch(i, grads, places=places, room=outside.room)
            return in_collectives(outside.left_by(talk, doubts), session.world)

        with unseen() as doubts:
            try:
                with session.repeatable(), nullcontext() if session.rollback else _put_back(held):
                    tape = record(again(), self._link, self._graphs)
            except Unrecordable as wrong:
                part.refuse(wrong)
                session.said, session.meant = said, meant
                doubts.clear()
                heard = hold(again(), self._link, wrong.heard)
            else:
                heard = tape.outcome
                before = [dict(memory) for memory in held]
                part.takes.append(Take(tape, before, how, list(doubts), session.said - said, session.meant - meant))
        session.doubts += doubts
        return heard

    def _record_verdict(self, heard: Sequence[Heard], written: Sequence[Tensor]) -> Tape[None] | None:
        assert self._graphs is not None

        def talking() -> Talking[None]:
            self.session.overrule_(heard, written)
            yield from ()

        try:
            return record(talking(), self._link, self._graphs)
        except Unrecordable:
            self.session.overrule_(heard, written)
            return None


def _same(one: Sequence[Memory], other: Sequence[Memory]) -> bool:
    """Whether these are the very same tensors."""
    return all(
        len(mine) == len(theirs) and all(theirs.get(name) is x for name, x in mine.items())
        for mine, theirs in zip(one, other, strict=True)
    )
