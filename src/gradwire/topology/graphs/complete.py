"""Complete: everybody hears everybody.

Paper:    the centralized case of Lian et al., "Can decentralized algorithms outperform centralized algorithms?",
          NeurIPS 2017. https://arxiv.org/abs/1705.09056
Formula:  w_ij = 1/n
Wire:     nothing
Traits:   any size; symmetric; degree n - 1; rho = 1, beta = 1
Differs:  as in the paper
Spec:     complete
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

from gradwire.core.registry import register
from gradwire.topology.graph import Undirected


@register("complete", kind="topology")
@dataclass(frozen=True)
class Complete(Undirected):
    """All pairs: one round averages."""

    weights: str = "metropolis"
    examples: ClassVar[tuple[str, ...]] = ("complete",)

    def links(self, size: int) -> Iterable[tuple[int, int]]:
        return combinations(range(size), 2)
