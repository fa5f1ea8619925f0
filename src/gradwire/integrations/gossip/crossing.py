"""Crossing: one talk that goes on in a thread of its own, while the model trains."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class Crossing(Generic[T]):
    """At most one talk at a time; one thread, first in, first out: ranks would otherwise meet in the wrong swap."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._thread: ThreadPoolExecutor | None = None
        self._under_way: Future[T] | None = None
        self._stream: torch.cuda.Stream | None = None  # always the same: memory is kept for each

    def board(self, work: Callable[[], T]) -> None:
        """Start to talk; what the device computes until now is done before."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "gradwire-gossip")
        if self.device.type != "cuda":
            self._under_way = self._thread.submit(work)
            return
        self._stream = self._stream or torch.cuda.Stream(self.device)
        ready = torch.cuda.current_stream(self.device).record_event()
        self._under_way = self._thread.submit(_after, ready, self._stream, work)

    def land(self) -> T | None:
        """Wait for the talk, if there is one, and return its outcome."""
        under_way, self._under_way = self._under_way, None
        return None if under_way is None else under_way.result()


def _after(ready: "torch.cuda.Event", stream: "torch.cuda.Stream", work: Callable[[], T]) -> T:
    with torch.cuda.stream(stream):
        stream.wait_event(ready)
        done = work()
        stream.synchronize()
        return done
