"""Graphs: a forward and backward pass, of one worker or of all, recorded once by CUDA and replayed with new inputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire_lab.train.data import Batch
from gradwire_lab.train.models import State

States = list[State]
Pass = Callable[[int, Batch, States], tuple[dict[str, Tensor | None], Tensor, States]]
WARM_UP = 3  # passes before recording, in which libraries choose their algorithms


class CapturedWorkerPass:
    """One worker's pass. What it returns is overwritten by the next replay.

    Attributes:
        pool: Memory that other workers' recordings may share, since only their results stay in use.
    """

    def __init__(self, run: Pass, worker: int, share: Batch, states: States, pool: Any = None) -> None:
        self.share = Batch(share.inputs.clone(), share.targets.clone())
        self.states = [(h.clone(), c.clone()) for h, c in states]
        _warm(lambda: run(worker, self.share, self.states))
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, pool=pool):
            self._grads, self._loss, self._after = run(worker, self.share, self.states)
        self.pool = self._graph.pool()

    def fits(self, share: Batch, states: States) -> bool:
        """Whether these inputs have the recorded shape."""
        return share.inputs.shape == self.share.inputs.shape and len(states) == len(self.states)

    def __call__(self, share: Batch, states: States) -> tuple[dict[str, Tensor | None], Tensor, States]:
        self.share.inputs.copy_(share.inputs)
        self.share.targets.copy_(share.targets)
        for (h, c), (new_h, new_c) in zip(self.states, states, strict=True):
            h.copy_(new_h)
            c.copy_(new_c)
        self._graph.replay()
        return self._grads, self._loss, [(h.clone(), c.clone()) for h, c in self._after]


class CapturedPass:
    """A pass, recorded by CUDA and replayed with new inputs; what it returns is overwritten by the next replay."""

    def __init__(self, run: Callable[[Tensor, Tensor], Tensor], inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs.clone(), targets.clone()
        _warm(lambda: run(self.inputs, self.targets))
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._losses = run(self.inputs, self.targets)

    def __call__(self, inputs: Tensor, targets: Tensor) -> Tensor:
        self.inputs.copy_(inputs)
        self.targets.copy_(targets)
        self._graph.replay()
        return self._losses


def _warm(run: Callable[[], object]) -> None:
    """Run a few times beside the current stream, as recording wants it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP):
            run()
    torch.cuda.current_stream().wait_stream(side)
