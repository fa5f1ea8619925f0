"""Arrows: any directed graph of the user's, written as a list of pairs (from, to).

Paper:    Nedic and Olshevsky, "Distributed optimization over time-varying directed graphs", IEEE TAC 2015; Assran et
          al., "Stochastic gradient push for distributed deep learning", ICML 2019. https://arxiv.org/abs/1811.10792
Formula:  j sends to i for each pair (j, i);  w_ij = w_jj = 1 / (1 + number of those j sends to)
Wire:     nothing
Traits:   the one size that its ranks have; column-stochastic, so push-sum can use it; plain gossip can only where rows
          sum to 1 too
Differs:  as in the papers
Spec:     arrows([(0, 1), (1, 2), (2, 0)])
"""

from dataclasses import dataclass
from typing import ClassVar

from gradwire.core.registry import register
from gradwire.topology.checks import Promise, Round
from gradwire.topology.graph import Graph
from gradwire.topology.graphs.edges import Pairs, fit, pairs
from gradwire.topology.weights import split


@register("arrows", kind="topology")
@dataclass(frozen=True)
class Arrows(Graph):
    """Pairs (from, to)."""

    listed: Pairs
    examples: ClassVar[tuple[str, ...]] = (
        "arrows([(0, 1), (1, 2), (2, 0)])",
        "arrows([(0, 1), (0, 2), (1, 2), (2, 0)])",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "listed", pairs("arrows", self.listed))

    @property
    def promise(self) -> Promise:
        return "column"

    def rounds(self, size: int) -> tuple[Round, ...]:
        fit("arrows", self.listed, size)
        return (split([{to for source, to in self.listed if source == rank} for rank in range(size)]),)
