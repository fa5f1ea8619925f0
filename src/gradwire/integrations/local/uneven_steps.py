"""Uneven steps: how many inner steps each rank takes in a round, so that all of them end it at about the same time."""

import time

import torch

from gradwire.core.payload import Payload, as_bytes, from_bytes
from gradwire.core.requests import Gather
from gradwire.engine.drive import RoundGenerator


class UnevenSteps:
    """The steps of each rank in a round, by the speed that was measured in the round before.

    Attributes:
        steps: Of each rank, by rank.
    """

    def __init__(self, H: int, rank: int, world: int) -> None:
        self._H, self._rank = H, rank
        self.steps = [H] * world
        self.restart()

    @property
    def own(self) -> int:
        """The steps of this rank."""
        return self.steps[self._rank]

    @property
    def weight(self) -> float:
        """Of this rank's difference in the mean: its share of all steps, times the number of ranks."""
        return self.own * len(self.steps) / sum(self.steps)

    def restart(self) -> None:
        """A round begins."""
        self._began = time.perf_counter()

    def seconds_per_step(self) -> float:
        """Of this rank, in the round that ends."""
        return (time.perf_counter() - self._began) / self.own

    def agree(self, device: torch.device) -> RoundGenerator[None]:
        """Compare speeds with all ranks, and choose the steps of the next round."""
        mine = torch.tensor([self.seconds_per_step()], dtype=torch.float64, device=device)
        (payloads,) = yield [Gather(Payload(as_bytes(mine)))]
        seconds = [float(from_bytes(payload.data[:8], torch.float64)) for payload in payloads]
        speeds = [1.0 / max(one, 1e-9) for one in seconds]
        each = self._H * len(speeds) / sum(speeds)
        self.steps = [max(1, round(each * speed)) for speed in speeds]
        self.restart()
