"""Expander: a ring with a chord from each rank to its inverse modulo a prime.

Paper:    Lubotzky, "Discrete groups, expanding graphs and invariant measures", 1994; Hoory, Linial, Wigderson,
          "Expander graphs and their applications", Bulletin of the AMS 2006, Section 2.1
Formula:  i ~ i + 1 mod n;  i ~ i^-1 mod n, and 0 ~ 0
Wire:     nothing
Traits:   prime sizes, and 1; symmetric; degree at most 3; rho bounded from below whatever the size
Differs:  a chord that coincides with an edge of the ring is merged with it, and loops (0, 1 and n - 1 are their own
          inverses) go into the rank's own weight, so that rows sum to 1 for every prime
Spec:     expander
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

from gradwire.core.registry import register
from gradwire.topology.graph import Undirected


def prime(n: int) -> bool:
    """Whether n has no divisor but 1 and itself."""
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


@register("expander", kind="topology")
@dataclass(frozen=True)
class Expander(Undirected):
    """Three neighbors are enough to mix well."""

    weights: str = "metropolis"
    examples: ClassVar[tuple[str, ...]] = ("expander",)

    def links(self, size: int) -> Iterable[tuple[int, int]]:
        if size > 1 and not prime(size):
            below = next(n for n in range(size, 1, -1) if prime(n))
            above = next(n for n in count(size) if prime(n))
            raise ValueError(
                f"{self} has a prime number of ranks, since its chords are inverses, and {size} is none; "
                f"use {below} or {above} ranks, or the graph exponential"
            )
        for i in range(size):
            yield i, (i + 1) % size
            yield i, pow(i, -1, size) if i else 0
