"""Ferry: one thread that carries messages while the training goes on.

With the `delayed` exchange, a step hands back the mean of the step before, so that its own messages may travel behind
the next forward and backward pass. One thread, in order: ranks would otherwise meet in the wrong collective. Work that
never waits for a device needs no thread: it only queues up there, on a stream of its own.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from gradwire.engine.drive import drive
from gradwire.engine.session import Verdict

if TYPE_CHECKING:
    from gradwire.integrations.wire import Wire

T = TypeVar("T")


class CompletedFuture(Generic[T]):
    """What became of work that is over: as a future that needs no locks."""

    __slots__ = ("_outcome", "_wrong")

    def __init__(self, outcome: list[T], wrong: BaseException | None = None) -> None:
        self._outcome, self._wrong = outcome, wrong

    def result(self) -> T:
        """The outcome; or what went wrong is raised."""
        if self._wrong is not None:
            raise self._wrong
        return self._outcome[0]


class CommWorker:
    """At most one crossing at a time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._ready: torch.cuda.Event | None = None
        self._crossing: Future[Verdict] | None = None

    def swap(self, wire: "Wire", grads: Mapping[str, Tensor | None], scale: float) -> Verdict:
        """Send today's gradients off, and hand back what was agreed on yesterday's."""
        self.land(wire)
        shapes = {name: p.shape for name, p in wire.parameters.items()}
        yesterday = {name: x.view(shapes[name]).clone() for name, x in wire.session.pending.items()}
        luggage = {name: None if g is None else g.detach().clone() for name, g in grads.items()}
        self._crossing = self.board(lambda: self._cross(wire, luggage, scale))
        return Verdict(yesterday, skipped=False)

    def board(self, work: Callable[[], T]) -> "Future[T]":
        """Do some work on the thread, after all that was boarded before."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "gradwire-ferry")
        ready = torch.cuda.current_stream(self._device.index).record_event() if self._device.type == "cuda" else None
        return self._thread.submit(self._work, work, ready)

    def queue(self, work: Callable[[], T]) -> "CompletedFuture[T]":
        """Do some work at once, on a stream beside the current one, after all that was queued there."""
        kind = self._device.type
        ready = None
        if kind == "cuda":  # the stream waits at once for what is recorded, so that one event serves all
            ready = self._ready = self._ready or torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._device.index))
        try:
            # Whoever calls backward under autocast does not mean our arithmetic.
            with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
                return CompletedFuture([self._work(work, ready)])
        except BaseException as wrong:
            return CompletedFuture([], wrong)

    def _work(self, work: Callable[[], T], ready: "torch.cuda.Event | None") -> T:
        if ready is None:
            return work()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with _on(self._stream, self._device.index):
            self._stream.wait_event(ready)
            return work()

    def land(self, wire: "Wire") -> None:
        """Wait until nothing is under way."""
        crossing, self._crossing = self._crossing, None
        if crossing is None:
            return
        verdict = crossing.result()
        for name, pending in wire.session.pending.items():
            if verdict.skipped or name not in verdict.updates:
                pending.zero_()  # it was handed out already

    def _cross(self, wire: "Wire", grads: Mapping[str, Tensor | None], scale: float) -> Verdict:
        wire.session.ahead = False  # `land` must know how it ended
        return drive(wire.session.run(grads, 1.0 / scale), wire.link, wire.clock)


@contextmanager
def _on(stream: torch.cuda.Stream, index: int) -> Iterator[None]:
    """As `torch.cuda.stream`, which finds out the number of the device anew each time, and takes 30 us for it."""
    before = [torch.cuda.current_stream(i) for i in (index, torch.cuda.current_device())]
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        for one in before:  # the last one brings its device back, too
            torch.cuda.set_stream(one)
