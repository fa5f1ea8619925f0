"""Social: who came to which party, in a southern town in the 1930s.

Paper:    Davis, Gardner, Gardner, "Deep South", University of Chicago Press 1941; as a graph of workers in Koloskova et
          al., "Decentralized deep learning with arbitrary communication compression", ICLR 2020.
          https://arxiv.org/abs/1907.09356
Formula:  18 women ~ the 14 events they attended
Wire:     nothing
Traits:   32 ranks; symmetric; 89 edges, bipartite; degrees 2 to 14; rho = 0.0821, beta = 1.434, or 0.0903 and 1.608
          with weights='max_degree'
Differs:  the second paper has weights='max_degree', which leaves the best visited event nothing of its own
Spec:     social, social(weights='max_degree')
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from gradwire.core.registry import register
from gradwire.topology.graph import Undirected

# Events 1 to 14 that each woman attended: ranks 0 to 17 are women, 18 to 31 events.
ATTENDED = (
    (1, 2, 3, 4, 5, 6, 8, 9),
    (1, 2, 3, 5, 6, 7, 8),
    (2, 3, 4, 5, 6, 7, 8, 9),
    (1, 3, 4, 5, 6, 7, 8),
    (3, 4, 5, 7),
    (3, 5, 6, 8),
    (5, 6, 7, 8),
    (6, 8, 9),
    (5, 7, 8, 9),
    (7, 8, 9, 12),
    (8, 9, 10, 12),
    (8, 9, 10, 12, 13, 14),
    (7, 8, 9, 10, 12, 13, 14),
    (6, 7, 9, 10, 11, 12, 13, 14),
    (7, 8, 10, 11, 12),
    (8, 9),
    (9, 11),
    (9, 11),
)


@register("social", kind="topology")
@dataclass(frozen=True)
class Social(Undirected):
    """A graph as people make them: few hubs, many at the edge."""

    weights: str = "metropolis"
    examples: ClassVar[tuple[str, ...]] = ("social", "social(weights='max_degree')")

    def links(self, size: int) -> Iterable[tuple[int, int]]:
        if size != 32:
            raise ValueError(f"{self} has 32 ranks, not {size}; use 32, or another graph such as erdos_renyi(0.2)")
        return ((woman, 17 + event) for woman, events in enumerate(ATTENDED) for event in events)
