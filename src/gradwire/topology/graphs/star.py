"""Star: rank 0 hears everybody, everybody hears rank 0.

Paper:    Xiao and Boyd, "Fast linear iterations for distributed averaging", Systems and Control Letters 2004
Formula:  0 ~ i for i > 0;  w_0i = 1/n
Wire:     nothing
Traits:   any size; symmetric; degree n - 1 at the center, 1 elsewhere; rho = 1/n from n = 3 on
Differs:  this is gossip, in which the center is a rank as others are; a parameter server would be `complete`
Spec:     star
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from gradwire.core.registry import register
from gradwire.topology.graph import Undirected


@register("star", kind="topology")
@dataclass(frozen=True)
class Star(Undirected):
    """One center."""

    weights: str = "metropolis"
    examples: ClassVar[tuple[str, ...]] = ("star",)

    def links(self, size: int) -> Iterable[tuple[int, int]]:
        return ((0, i) for i in range(1, size))
