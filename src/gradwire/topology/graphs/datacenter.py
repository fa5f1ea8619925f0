"""Data center: complete inside each group of ranks, a ring of single edges between the groups.

Paper:    Koloskova et al., "Decentralized deep learning with arbitrary communication compression", ICLR 2020.
          https://arxiv.org/abs/1907.09356, the data-center experiment
Formula:  i ~ j inside a group;  the last rank of a group ~ the first of the next, and of the last ~ that of the first
Wire:     nothing
Traits:   any size from the number of groups on; symmetric; two slow edges per group, whatever its size
Differs:  the paper leaves open which ranks hold the edges between groups; groups are runs of ranks as launchers number
          them, the first ones larger by one where the size does not divide
Spec:     datacenter(4)
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

from gradwire.core.registry import register
from gradwire.topology.graph import Undirected


@register("datacenter", kind="topology")
@dataclass(frozen=True)
class DataCenter(Undirected):
    """Fast inside, thin between.

    Attributes:
        groups: How many groups, for example machines.
        weights: See `weights`.
    """

    groups: int
    weights: str = "metropolis"
    examples: ClassVar[tuple[str, ...]] = ("datacenter(1)", "datacenter(2)", "datacenter(4)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.groups, bool) or not isinstance(self.groups, int) or self.groups < 1:
            raise ValueError(f"datacenter({self.groups!r}) needs a number of groups, at least 1; write datacenter(4)")

    def links(self, size: int) -> Iterable[tuple[int, int]]:
        if size < self.groups:
            raise ValueError(f"{self} has at least one rank in each group; use {self.groups} ranks or more, not {size}")
        short, longer = divmod(size, self.groups)
        starts = [g * short + min(g, longer) for g in range(self.groups + 1)]
        for g in range(self.groups):
            yield from combinations(range(starts[g], starts[g + 1]), 2)
            if self.groups > 1:
                yield starts[g + 1] - 1, starts[g + 1] % size
