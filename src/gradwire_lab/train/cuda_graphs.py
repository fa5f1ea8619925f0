"""CUDA graphs: a forward and backward pass, of one worker or of all, captured once and replayed with new inputs."""

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

WARM_UP = 3  # passes before the capture, in which libraries choose their algorithms
T = TypeVar("T")


class CapturedPass(Generic[T]):
    """A pass; what it returns is overwritten by the next replay.

    Attributes:
        pool: Memory that captures of other passes may share, since only their results stay in use.
    """

    def __init__(self, run: Callable[..., T], *inputs: Tensor, pool: Any = None) -> None:
        self.inputs = [x.clone() for x in inputs]
        side = torch.cuda.Stream()  # a capture wants warm-up on another stream
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                run(*self.inputs)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._result = run(*self.inputs)
        self.pool = self._graph.pool()

    def fits(self, *inputs: Tensor) -> bool:
        """Whether these inputs have the captured shapes."""
        return [x.shape for x in inputs] == [x.shape for x in self.inputs]

    def __call__(self, *inputs: Tensor) -> T:
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new)
        self._graph.replay()
        return self._result
