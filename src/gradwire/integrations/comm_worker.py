"""CommWorker: communication while training continues.

Work that waits for messages runs on one thread, in order: ranks would otherwise mix up collectives. Work that
never waits for a device needs no thread: it is queued at once, on a stream of its own.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
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


AnyFuture: TypeAlias = Future[T] | CompletedFuture[T]


class CommWorker:
    """One thread and one stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._thread: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._ready: torch.cuda.Event | None = None
        self._done: torch.cuda.Event | None = None

    def submit(self, work: Callable[[], T]) -> "Future[T]":
        """Do some work on the thread, after all that was submitted before."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "gradwire-comm")
        ready = torch.cuda.current_stream(self._device.index).record_event() if self._device.type == "cuda" else None
        return self._thread.submit(self._work, work, ready)

    def enqueue(self, work: Callable[[], T]) -> "CompletedFuture[T]":
        """Do some work at once, on another stream than the current one, after all that was enqueued there."""
        kind = self._device.type
        ready = None
        if kind == "cuda":  # the stream waits at once for what is recorded, so that one event serves all
            ready = self._ready = self._ready or torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self._device.index))
        try:
            # A backward pass may run under autocast, which must not change our arithmetic.
            with torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext():
                return CompletedFuture([self._work(work, ready)])
        except BaseException as error:
            return CompletedFuture([], error)

    def run(self, work: Callable[[], T]) -> T:
        """Do some work at once, on the same stream, and have the current stream wait for it.

        Steps are captured on a stream of their own, so eager steps, whose kernels plan for a stream, run there too.
        """
        if self._device.type != "cuda":
            return work()
        done = self.enqueue(work)
        if self._stream is not None:
            finished = self._done = self._done or torch.cuda.Event()
            finished.record(self._stream)
            torch.cuda.current_stream(self._device.index).wait_event(finished)
        return done.result()

    def _work(self, work: Callable[[], T], ready: "torch.cuda.Event | None") -> T:
        if ready is None:
            return work()
        if self._stream is None:
            self._stream = torch.cuda.Stream(self._device)
        with _on(self._stream, self._device.index):
            self._stream.wait_event(ready)
            return work()


@contextmanager
def _on(stream: torch.cuda.Stream, index: int) -> Iterator[None]:
    """As `torch.cuda.stream`, which looks up the number of the device each time, and takes 30 us for it."""
    before = [torch.cuda.current_stream(index)]
    if index != (current := torch.cuda.current_device()):
        before.append(torch.cuda.current_stream(current))  # which brings its device back, too
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        for one in before:
            torch.cuda.set_stream(one)
