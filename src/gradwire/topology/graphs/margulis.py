"""Margulis: the expander of Margulis, Gabber and Galil on a square grid.

Paper:    Gabber and Galil, "Explicit constructions of linear-sized superconcentrators", JCSS 1981
Formula:  n = b^2;  (x, y) ~ (x + 2 y, y), (x + 2 y + 1, y), (x, y + 2 x), (x, y + 2 x + 1), all mod b
Wire:     nothing
Traits:   square sizes; symmetric; degree at most 8; rho bounded from below whatever the size
Differs:  double edges are merged, and loops go into the rank's own weight
Spec:     margulis, margulis(weights='max_degree')
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from gradwire.core.registry import register
from gradwire.topology.graph import Undirected


@register("margulis", kind="topology")
@dataclass(frozen=True)
class Margulis(Undirected):
    """Rank x * b + y sits at (x, y)."""

    weights: str = "metropolis"
    examples: ClassVar[tuple[str, ...]] = ("margulis", "margulis(weights='max_degree')")

    def links(self, size: int) -> Iterable[tuple[int, int]]:
        b = math.isqrt(size)
        if b * b != size:
            raise ValueError(
                f"{self} has a square number of ranks, which {size} is not; "
                f"use {b * b} or {(b + 1) ** 2} ranks, or the graph exponential"
            )
        for rank in range(size):
            x, y = divmod(rank, b)
            for turn in (0, 1):
                yield rank, (x + 2 * y + turn) % b * b + y
                yield rank, x * b + (y + 2 * x + turn) % b
