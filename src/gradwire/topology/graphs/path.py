"""Path: a line with two ends.

Paper:    Xiao and Boyd, "Fast linear iterations for distributed averaging", Systems and Control Letters 2004
Formula:  i ~ i + 1 for i < n - 1
Wire:     nothing
Traits:   any size; symmetric; degree 2, 1 at the ends; rho of the order of 1/n^2, a quarter of the ring's
Differs:  as in the paper
Spec:     path
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from gradwire.core.registry import register
from gradwire.topology.graph import Undirected


@register("path", kind="topology")
@dataclass(frozen=True)
class Path(Undirected):
    """An open line: the slowest of all to average."""

    weights: str = "metropolis"
    examples: ClassVar[tuple[str, ...]] = ("path",)

    def links(self, size: int) -> Iterable[tuple[int, int]]:
        return pairwise(range(size))
