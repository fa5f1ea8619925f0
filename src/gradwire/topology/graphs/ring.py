"""Ring: each rank hears the one before and the one after.

Paper:    Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NeurIPS 2017.
          https://arxiv.org/abs/1705.09056
Formula:  i ~ i + 1 mod n;  w_ij = 1/3 from n = 3 on, 1/2 at n = 2
Wire:     nothing
Traits:   any size; symmetric; degree 2; rho = (2 - 2 cos(2 pi / n)) / 3, of the order of 1/n^2
Differs:  at n = 2 the two edges between the ranks are one
Spec:     ring
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from gradwire.core.registry import register
from gradwire.topology.graph import Undirected


@register("ring", kind="topology")
@dataclass(frozen=True)
class Ring(Undirected):
    """A closed line."""

    weights: str = "metropolis"
    examples: ClassVar[tuple[str, ...]] = ("ring", "ring(weights='uniform')")

    def links(self, size: int) -> Iterable[tuple[int, int]]:
        return ((i, (i + 1) % size) for i in range(size))
