"""Stragglers: who waits for whom when workers are not equally fast at every step.

In an all-reduce every worker waits for the slowest of all; in gossip only for the slowest neighbor, whose own delays
arrive a little later. Both are played on the same drawn speeds.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_STEPS = 64


@dataclass(frozen=True)
class Stragglers:
    """How uneven workers are.

    Attributes:
        jitter: Standard deviation of a worker's computing time, as a share of it.
        share: Of worker-steps that are slowed.
        slowdown: By what factor those are.
        seed: Of the draws.
    """

    jitter: float = 0.0
    share: float = 0.0
    slowdown: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not (0 <= self.jitter < 1 and 0 <= self.share <= 1 and self.slowdown >= 1):
            raise ValueError(
                f"a jitter of {self.jitter:g} and a share of {self.share:g} that are {self.slowdown:g} times slower "
                "make no sense; give shares from 0 to 1 and a slowdown of 1 or more"
            )

    @property
    def none(self) -> bool:
        return self.jitter == 0 and (self.share == 0 or self.slowdown == 1)

    def together(self, workers: int) -> float:
        """By what factor computing takes longer when every step waits for all."""
        return 1.0 if self.none else float(self._drawn(workers).amax(1).mean())

    def in_a_ring(self, workers: int) -> float:
        """The same when a worker waits for its two neighbors on a ring alone."""
        if self.none:
            return 1.0
        done = torch.zeros(workers)
        for seconds in self._drawn(workers):
            done = torch.maximum(done, torch.maximum(done.roll(1), done.roll(-1))) + seconds
        return float(done.mean()) / _STEPS

    def _drawn(self, workers: int) -> Tensor:
        """Computing times relative to an even one, [steps, workers]."""
        draw = torch.Generator().manual_seed(self.seed)
        even = 1 + self.jitter * torch.randn(_STEPS, workers, generator=draw)
        slow = torch.rand(_STEPS, workers, generator=draw) < self.share
        return torch.where(slow, self.slowdown, 1.0) * even.clamp(min=0.2)
