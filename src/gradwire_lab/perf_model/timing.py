"""Timing: clocks of a device, and figures that all ranks share."""

import os
import time
from collections.abc import Sequence
from typing import TypeAlias

import torch

from gradwire.comm.backend import Backend
from gradwire.comm.collectives import AllReduceOp

Moment: TypeAlias = "float | torch.cuda.Event"


def now(device: torch.device) -> float:
    """Seconds of the host's clock, once the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def slowest(link: Backend, seconds: Sequence[float]) -> list[float]:
    """The largest of all ranks' figures, one by one: the same everywhere, so that all ranks decide alike."""
    figures = torch.tensor(list(seconds), dtype=torch.float64, device=link.device)
    largest: list[float] = link.move(AllReduceOp(figures, "max")).tolist()
    return largest


def cores_per_thread(device: torch.device, ranks: int) -> float:
    """Processors for each thread that computes, of so many ranks here; a GPU does one thing after the other."""
    return 1.0 if device.type == "cuda" else (os.cpu_count() or 1) / ranks / torch.get_num_threads()


class Stopwatch:
    """Moments on a device. On a GPU they are events, which take their place in its queue without a wait."""

    def __init__(self, device: torch.device) -> None:
        self._queued = device.type == "cuda"

    def __call__(self) -> Moment:
        if not self._queued:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, first: Moment, last: Moment) -> float:
        """From one to the other, once the device has passed both."""
        if isinstance(first, float):
            assert isinstance(last, float)
            return last - first
        assert not isinstance(last, float)
        last.synchronize()
        return float(first.elapsed_time(last)) / 1e3
