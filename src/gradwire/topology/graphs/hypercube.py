"""Hypercube: ranks whose binary numbers differ in one digit.

Paper:    Xiao and Boyd, "Fast linear iterations for distributed averaging", Systems and Control Letters 2004
Formula:  i ~ i xor 2^k for k < d, n = 2^d;  w_ij = 1 / (1 + d)
Wire:     nothing
Traits:   powers of two; symmetric; degree d = log2 n; rho = 2 / (1 + d) from n = 2 on
Differs:  as in the paper
Spec:     hypercube
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from gradwire.core.registry import register
from gradwire.topology.graph import Undirected


@register("hypercube", kind="topology")
@dataclass(frozen=True)
class Hypercube(Undirected):
    """A cube of log2(n) dimensions."""

    weights: str = "metropolis"
    examples: ClassVar[tuple[str, ...]] = ("hypercube",)

    def links(self, size: int) -> Iterable[tuple[int, int]]:
        dimensions = size.bit_length() - 1
        if size != 1 << dimensions:
            raise ValueError(
                f"{self} has a power of two of ranks, which {size} is not; "
                f"use {1 << dimensions} or {2 << dimensions} ranks, or the graph exponential"
            )
        return ((i, i ^ 1 << k) for i in range(size) for k in range(dimensions))
