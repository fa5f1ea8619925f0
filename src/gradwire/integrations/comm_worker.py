"""CommWorker: communication while training continues.

Work that waits for messages runs on one thread, in order: ranks would otherwise mix up collectives. Work that
never waits for a device needs no thread: it is queued at once, on a stream of its own.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import cached_property
from typing import Generic, TypeAlias, TypeVar

import torch

T = TypeVar("T")


class CompletedFuture(Generic[T]):
    """The outcome of work that is over, as a future that needs no locks."""

    __slots__ = ("_error", "_values")

    def __init__(self, values: list[T], error: BaseException | None = None) -> None:
        self._values, self._error = values, error

    def result(self) -> T:
        """The outcome; an error is raised."""
        if self._error is not None:
            raise self._error
        return self._values[0]

    def exception(self) -> BaseException | None:
        """The error, if there was one."""
        return self._error


AnyFuture: TypeAlias = Future[T] | CompletedFuture[T]


class CommWorker:
    """One thread and one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread: ThreadPoolExecutor | None = None
        self._events: list[torch.cuda.Event] = []  # that nothing uses now
        self._ready: torch.cuda.Event | None = None
        self._done: torch.cuda.Event | None = None

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Do some work on the thread, after all that was submitted before."""
        cuda = self._device.type == "cuda"
        if self._thread is None:  # whose current stream is set once
            stream = (torch.cuda.set_stream, (self._stream,)) if cuda else ()
            self._thread = ThreadPoolExecutor(1, "gradwire-comm", *stream)
        if not cuda:
            return self._thread.submit(work)
        ready = self._events.pop() if self._events else torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device.index))
        return self._thread.submit(self._after, ready, work)

    def enqueue(self, work: Callable[[], T]) -> "CompletedFuture[T]":
        """Do some work at once, on another stream than the current one, after all that was enqueued there."""
        kind = self._device.type
        # A backward pass may run under autocast, which must not change our arithmetic.
        exact = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
        try:
            with exact, self._on_stream() if kind == "cuda" else nullcontext():
                return CompletedFuture([work()])
        except BaseException as error:
            return CompletedFuture([], error)

    def run(self, work: Callable[[], T]) -> T:
        """Do some work at once, on the same stream, and have the current stream wait for it.

        Steps are captured on a stream of their own, so eager steps, whose kernels plan for a stream, run there too.
        """
        if self._device.type != "cuda":
            return work()
        done = self.enqueue(work)
        self.join()
        return done.result()

    def join(self) -> None:
        """Have the current stream wait for all work that has been done so far."""
        if self._device.type == "cuda":
            finished = self._done = self._done or torch.cuda.Event()
            finished.record(self._stream)
            torch.cuda.current_stream(self._device.index).wait_event(finished)

    @cached_property
    def _stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self._device)

    @contextmanager
    def _on_stream(self) -> Iterator[None]:
        """A context in which work goes to the stream, after all work that the current one has so far.

        `torch.cuda.stream` looks up the number of the device each time, and takes 30 us for it.
        """
        index = self._device.index
        before = [torch.cuda.current_stream(index)]
        ready = self._ready = self._ready or torch.cuda.Event()  # one serves all: the stream waits at once
        ready.record(before[0])
        self._stream.wait_event(ready)
        if index != (current := torch.cuda.current_device()):
            before.append(torch.cuda.current_stream(current))  # setting it restores its device, too
        torch.cuda.set_stream(self._stream)
        try:
            yield
        finally:
            for one in before:
                torch.cuda.set_stream(one)

    def _after(self, ready: torch.cuda.Event, work: Callable[[], T]) -> T:
        """Do some work of the thread after an event."""
        self._stream.wait_event(ready)
        self._events.append(ready)  # which may be recorded again: the stream waits for what was recorded
        return work()
