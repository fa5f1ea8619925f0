"""Capture: generators of collectives as CUDA graphs, in parts between the collectives.

A host spends milliseconds on the fifty kernels and hundred small tensors of a step, where a GPU takes a whole graph of
them in microseconds. Collectives are not captured, so ranks need not agree on who replays.
"""

import os
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, Protocol, TypeAlias, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor

from gradwire.comm.backend import Backend
from gradwire.comm.collectives import Collective, fuse
from gradwire.core import Request
from gradwire.core.graph_refs import pin_tables
from gradwire.core.keys import RandomnessInGraph
from gradwire.core.requests import Finished, advance, intercept, run
from gradwire.engine.drive import Clock, RoundGenerator

T = TypeVar("T")
Collectives: TypeAlias = Generator[Collective, Tensor, T]


class DeviceGraph(Protocol):
    """Work of a device that can be captured once, and replayed."""

    def capturing(self) -> AbstractContextManager[None]:
        """A context in which work is captured, not executed."""

    def replay(self) -> None:
        """Run the captured work on the current stream."""


class CudaGraphs:
    """Makes graphs that share one memory pool: a later capture reuses memory that an earlier one has freed.

    Graphs do not run in the order of their capture, so nothing in the pool may be read after the bucket that wrote it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captured: WeakSet[CudaGraph] = WeakSet()
        self._pool: Any = None

    def __call__(self) -> "CudaGraph":
        if not self.captured:  # torch closes a pool with its last graph
            self._pool = torch.cuda.graph_pool_handle()
        return CudaGraph(self, self._pool)


class CudaGraph:
    """Torch's own."""

    def __init__(self, family: CudaGraphs, pool: Any) -> None:
        self._family, self._pool = family, pool
        self._graph = torch.cuda.CUDAGraph()

    @contextmanager
    def capturing(self) -> Iterator[None]:
        # Other threads, NCCL's among them, go on calling the driver meanwhile.
        self._graph.capture_begin(self._pool, capture_error_mode="thread_local")
        try:
            yield
        finally:
            self._end()
        self._family.captured.add(self)

    def replay(self) -> None:
        self._graph.replay()

    def _end(self) -> None:
        try:
            self._graph.capture_end()
        except RuntimeError:
            _reset_capture_state(self._family.device, self._pool)
            raise


def _reset_capture_state(device: torch.device, pool: Any) -> None:
    """Reset the allocator and the random generator after a failed capture.

    Both would act as if the capture continued; the generator raises errors until another capture has succeeded.
    """
    torch._C._cuda_endAllocateToPool(device.index, pool)
    other = torch.cuda.CUDAGraph()
    other.capture_begin(capture_error_mode="thread_local")
    torch.zeros(1, device=device)
    other.capture_end()


def graphs_on(device: torch.device) -> Callable[[], DeviceGraph] | None:
    """What makes graphs for a device; None if the device has none, or with ``GRADWIRE_GRAPHS=0``."""
    return CudaGraphs(device) if device.type == "cuda" and os.environ.get("GRADWIRE_GRAPHS") != "0" else None


class GraphPart(NamedTuple):
    """Some work, and the collective after it, with the memory that its result was written to."""

    graph: DeviceGraph
    collective: Collective | None
    result: Tensor | None


class CaptureError(Exception):
    """A generator cannot be captured.

    Attributes:
        results: Of the collectives that have been carried out.
        permanent: Whether another try would fail too.
    """

    def __init__(self, results: Sequence[Tensor], permanent: bool) -> None:
        self.results, self.permanent = results, permanent


@dataclass
class Captured(Generic[T]):
    """A captured generator, and its return value, whose tensors every replay fills again."""

    parts: list[GraphPart]
    value: T
    refs: list[Any]  # tables that graphs point at

    def replay(self, backend: Backend, clock: Clock) -> T:
        """Run it once more."""
        began, decoding = time.perf_counter(), False
        for graph, collective, result in self.parts:
            graph.replay()
            done = time.perf_counter()
            clock.work(done - began, decoding)
            began = done
            if collective is not None and result is not None:
                backend.run(collective, result)
                began, decoding = time.perf_counter(), True
                clock.wire += began - done
        return self.value


def capture(generator: Collectives[T], backend: Backend, graphs: Callable[[], DeviceGraph]) -> Captured[T]:
    """Run a generator, and capture it.

    Raises:
        CaptureError: It cannot be captured; its rest has not been run.
    """
    parts: list[GraphPart] = []
    result: Tensor | None = None
    with pin_tables() as refs:
        while True:
            graph = graphs()
            try:
                with graph.capturing():
                    request = advance(generator, result)
            except Exception as error:  # an error of the generator itself is raised again when it runs eagerly
                results = [part.result for part in parts if part.result is not None]
                raise CaptureError(results, isinstance(error, RandomnessInGraph)) from error
            graph.replay()
            if isinstance(request, Finished):
                parts.append(GraphPart(graph, None, None))
                return Captured(parts, request.value, refs)
            result = backend.run(request)
            parts.append(GraphPart(graph, request, result))


def resume(generator: Collectives[T], backend: Backend, known: Sequence[Tensor] = ()) -> T:
    """Run a generator whose first collectives are done already, with their results."""
    results = iter(known)

    def serve(collective: Collective) -> Tensor:
        result = next(results, None)
        return backend.run(collective) if result is None else result

    return run(generator, serve)


def in_collectives(rounds: RoundGenerator[T], backend: Backend) -> Collectives[T]:
    """Rounds of requests as the collectives that answer them."""

    def serve(requests: list[Request]) -> Collectives[list[Any]]:
        return fuse(requests, backend.size_of(requests[0].scope))

    return intercept(rounds, serve)
