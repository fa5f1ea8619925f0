"""Graphs: a worker's forward and backward pass, recorded once by CUDA and replayed with new inputs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from gradwire.train.data import Batch
from gradwire.train.models import State

States = list[State]
Pass = Callable[[int, Batch, States], tuple[dict[str, Tensor | None], Tensor, States]]
WARM_UP = 3  # passes before recording, in which libraries choose their algorithms


class Recorded:
    """One worker's pass. What it returns is overwritten by the next replay.

    Attributes:
        pool: Memory that other workers' recordings may share, since only their results stay in use.
    """

    def __init__(self, run: Pass, worker: int, share: Batch, states: States, pool: Any = None) -> None:
        self.share = Batch(share.inputs.clone(), share.targets.clone())
        self.states = [(h.clone(), c.clone()) for h, c in states]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UP):
                run(worker, self.share, self.states)
        torch.cuda.current_stream().wait_stream(side)
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
