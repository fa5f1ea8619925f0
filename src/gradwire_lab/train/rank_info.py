"""RankInfo: where this process stands among the workers of a run."""

from pathlib import Path
from typing import NamedTuple

import torch


class RankInfo(NamedTuple):
    """One process: either one rank of a process group, or all ranks of a world in lockstep.

    Attributes:
        world: How many workers there are.
        ranks: Those that live here.
        device: Where they compute.
        rendezvous: The folder in which workers find each other that may die and come back; None: a process group knows.
    """

    world: int
    ranks: tuple[int, ...]
    device: torch.device
    rendezvous: Path | None = None

    @property
    def simulated(self) -> bool:
        """Whether the whole world lives here."""
        return len(self.ranks) == self.world

    @property
    def first(self) -> bool:
        """Whether this process writes for all."""
        return 0 in self.ranks


def simulated_ranks(world: int, device: torch.device | str = "cpu") -> RankInfo:
    """A world of simulated workers in this process."""
    return RankInfo(world, tuple(range(world)), torch.device(device))
