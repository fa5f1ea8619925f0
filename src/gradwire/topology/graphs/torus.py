"""Torus: a grid whose opposite sides are joined.

Paper:    Koloskova et al., "Decentralized deep learning with arbitrary communication compression", ICLR 2020.
          https://arxiv.org/abs/1907.09356
Formula:  n = a b with a <= b as near as may be;  (y, x) ~ (y + 1 mod a, x), (y, x + 1 mod b);  w_ij = 1/5 from a = 3 on
Wire:     nothing
Traits:   sizes up to 3, and those that are not prime; symmetric; degree 4, or 3 where a = 2; rho of the order of 1/n
Differs:  on a side of 2 the two edges between neighbors are one, so that rows always sum to 1; a prime number of ranks
          has no other grid than a ring, and is refused
Spec:     torus
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from gradwire.core.registry import register
from gradwire.topology.graph import Undirected


def sides(size: int) -> tuple[int, int]:
    """The most nearly square grid of that many ranks."""
    a = next(side for side in range(math.isqrt(size), 0, -1) if size % side == 0)
    return a, size // a


@register("torus", kind="topology")
@dataclass(frozen=True)
class Torus(Undirected):
    """Rank y * b + x sits in row y and column x."""

    weights: str = "metropolis"
    examples: ClassVar[tuple[str, ...]] = ("torus",)

    def links(self, size: int) -> Iterable[tuple[int, int]]:
        a, b = sides(size)
        if a == 1 and size > 3:
            raise ValueError(
                f"a torus of {size} ranks would be a ring, since {size} is prime; "
                f"use ring, or a torus of {size - 1} or {size + 1} ranks"
            )
        for rank in range(size):
            y, x = divmod(rank, b)
            for other in ((y + 1) % a * b + x, y * b + (x + 1) % b):
                if other != rank:
                    yield rank, other
