"""The graphs that networkx builds: each class adds a name, a card, and the sizes that the graph has."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count
from typing import Any

from gradwire.core import register
from gradwire.topology.checks import networkx
from gradwire.topology.graph import Undirected

__all__ = ["Complete", "Expander", "Hypercube", "Margulis", "Path", "Ring", "Social", "Star", "Torus"]


@dataclass(frozen=True)
class Standard(Undirected):
    """A graph whose only option is its rule of weights."""

    weights: str = "metropolis"


def numbered(graph: Any, ordering: str = "sorted") -> Iterable[tuple[int, int]]:
    """The edges of a graph whose nodes are named otherwise, by the positions of the names."""
    edges: Iterable[tuple[int, int]] = networkx().convert_node_labels_to_integers(graph, ordering=ordering).edges()
    return edges


@register("complete", kind="topology")
class Complete(Standard):
    """All pairs: one round averages.

    Paper:    the centralized case of Lian et al., "Can decentralized algorithms outperform centralized algorithms?",
              NeurIPS 2017. https://arxiv.org/abs/1705.09056
    Formula:  w_ij = 1/n
    Wire:     nothing
    Traits:   any size; symmetric; degree n - 1; rho = 1, beta = 1
    Differs:  as in the paper
    Spec:     complete
    """

    examples = ("complete",)

    def edges(self, size: int) -> Iterable[tuple[int, int]]:
        return networkx().complete_graph(size).edges()  # type: ignore[no-any-return]


@register("path", kind="topology")
class Path(Standard):
    """A line with two ends: the slowest of all graphs to average.

    Paper:    Xiao and Boyd, "Fast linear iterations for distributed averaging", Systems and Control Letters 2004
    Formula:  i ~ i + 1 for i < n - 1
    Wire:     nothing
    Traits:   any size; symmetric; degree 2, 1 at the ends; rho of the order of 1/n^2, a quarter of the ring's
    Differs:  as in the paper
    Spec:     path
    """

    examples = ("path",)

    def edges(self, size: int) -> Iterable[tuple[int, int]]:
        return networkx().path_graph(size).edges()  # type: ignore[no-any-return]


@register("ring", kind="topology")
class Ring(Standard):
    """Each rank is connected to the one before and the one after.

    Paper:    Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NeurIPS 2017.
              https://arxiv.org/abs/1705.09056
    Formula:  i ~ i + 1 mod n;  w_ij = 1/3 from n = 3 on, 1/2 at n = 2
    Wire:     nothing
    Traits:   any size; symmetric; degree 2; rho = (2 - 2 cos(2 pi / n)) / 3, of the order of 1/n^2
    Differs:  at n = 2 the two edges between the ranks are one
    Spec:     ring
    """

    examples = ("ring", "ring(weights='uniform')")

    def edges(self, size: int) -> Iterable[tuple[int, int]]:
        return networkx().cycle_graph(size).edges()  # type: ignore[no-any-return]


@register("star", kind="topology")
class Star(Standard):
    """Rank 0 is connected to all others, and no others to each other.

    Paper:    Xiao and Boyd, "Fast linear iterations for distributed averaging", Systems and Control Letters 2004
    Formula:  0 ~ i for i > 0;  w_0i = 1/n
    Wire:     nothing
    Traits:   any size; symmetric; degree n - 1 at the center, 1 elsewhere; rho = 1/n from n = 3 on
    Differs:  this is gossip, in which the center is a rank as others are; a parameter server would be `complete`
    Spec:     star
    """

    examples = ("star",)

    def edges(self, size: int) -> Iterable[tuple[int, int]]:
        return networkx().star_graph(size - 1).edges()  # type: ignore[no-any-return]


@register("torus", kind="topology")
class Torus(Standard):
    """A grid whose opposite sides are joined; rank y * b + x is in row y and column x.

    Paper:    Koloskova et al., "Decentralized deep learning with arbitrary communication compression", ICLR 2020.
              https://arxiv.org/abs/1907.09356
    Formula:  n = a b with a <= b as near as may be;  (y, x) ~ (y + 1 mod a, x), (y, x + 1 mod b);  w_ij = 1/5 from
              a = 3 on
    Wire:     nothing
    Traits:   sizes up to 3, and those that are not prime; symmetric; degree 4, or 3 where a = 2; rho of the order of
              1/n
    Differs:  on a side of 2 the two edges between neighbors are one, so that rows always sum to 1; a prime number of
              ranks has no other grid than a ring, and is refused
    Spec:     torus
    """

    examples = ("torus",)

    def edges(self, size: int) -> Iterable[tuple[int, int]]:
        a, b = sides(size)
        if a == 1 and size > 3:
            raise ValueError(
                f"a torus of {size} ranks would be a ring, since {size} is prime; "
                f"use ring, or a torus of {size - 1} or {size + 1} ranks"
            )
        return numbered(networkx().grid_2d_graph(a, b, periodic=True))


def sides(size: int) -> tuple[int, int]:
    """The most nearly square grid of that many ranks."""
    a = next(side for side in range(math.isqrt(size), 0, -1) if size % side == 0)
    return a, size // a


@register("hypercube", kind="topology")
class Hypercube(Standard):
    """Ranks whose binary numbers differ in one digit: a cube of log2(n) dimensions.

    Paper:    Xiao and Boyd, "Fast linear iterations for distributed averaging", Systems and Control Letters 2004
    Formula:  i ~ i xor 2^k for k < d, n = 2^d;  w_ij = 1 / (1 + d)
    Wire:     nothing
    Traits:   powers of two; symmetric; degree d = log2 n; rho = 2 / (1 + d) from n = 2 on
    Differs:  as in the paper
    Spec:     hypercube
    """

    examples = ("hypercube",)

    def edges(self, size: int) -> Iterable[tuple[int, int]]:
        dimensions = size.bit_length() - 1
        if size != 1 << dimensions:
            raise ValueError(
                f"{self} needs a power of two of ranks, which {size} is not; "
                f"use {1 << dimensions} or {2 << dimensions} ranks, or the graph exponential"
            )
        return numbered(networkx().hypercube_graph(dimensions))


@register("expander", kind="topology")
class Expander(Standard):
    """A ring with a chord from each rank to its inverse modulo a prime: three neighbors are enough to mix well.

    Paper:    Lubotzky, "Discrete groups, expanding graphs and invariant measures", 1994; Hoory, Linial, Wigderson,
              "Expander graphs and their applications", Bulletin of the AMS 2006, Section 2.1
    Formula:  i ~ i + 1 mod n;  i ~ i^-1 mod n, and 0 ~ 0
    Wire:     nothing
    Traits:   prime sizes, and 1; symmetric; degree at most 3; rho bounded from below whatever the size
    Differs:  a chord that coincides with an edge of the ring is merged with it, and loops (0, 1 and n - 1 are their
              own inverses) go into the rank's own weight, so that rows sum to 1 for every prime
    Spec:     expander
    """

    examples = ("expander",)

    def edges(self, size: int) -> Iterable[tuple[int, int]]:
        if size == 1:
            return [(0, 0)]
        if not prime(size):
            below = next(n for n in range(size, 1, -1) if prime(n))
            above = next(n for n in count(size) if prime(n))
            raise ValueError(
                f"{self} needs a prime number of ranks, since its chords are inverses, and {size} is not prime; "
                f"use {below} or {above} ranks, or the graph exponential"
            )
        return networkx().chordal_cycle_graph(size).edges()  # type: ignore[no-any-return]


def prime(n: int) -> bool:
    """Whether n has no divisor but 1 and itself."""
    return n > 1 and all(n % d for d in range(2, int(n**0.5) + 1))


@register("margulis", kind="topology")
class Margulis(Standard):
    """The expander of Margulis, Gabber and Galil on a square grid; rank x * b + y is at (x, y).

    Paper:    Gabber and Galil, "Explicit constructions of linear-sized superconcentrators", JCSS 1981
    Formula:  n = b^2;  (x, y) ~ (x + 2 y, y), (x + 2 y + 1, y), (x, y + 2 x), (x, y + 2 x + 1), all mod b
    Wire:     nothing
    Traits:   square sizes; symmetric; degree at most 8; rho bounded from below whatever the size
    Differs:  double edges are merged, and loops go into the rank's own weight
    Spec:     margulis, margulis(weights='max_degree')
    """

    examples = ("margulis", "margulis(weights='max_degree')")

    def edges(self, size: int) -> Iterable[tuple[int, int]]:
        b = math.isqrt(size)
        if b * b != size:
            raise ValueError(
                f"{self} needs a square number of ranks, which {size} is not; "
                f"use {b * b} or {(b + 1) ** 2} ranks, or the graph exponential"
            )
        return numbered(networkx().margulis_gabber_galil_graph(b))


@register("social", kind="topology")
class Social(Standard):
    """Women and the events that they attended in a southern town in the 1930s: few hubs, many ranks at the edge.

    Paper:    Davis, Gardner, Gardner, "Deep South", University of Chicago Press 1941; as a graph of workers in
              Koloskova et al., "Decentralized deep learning with arbitrary communication compression", ICLR 2020.
              https://arxiv.org/abs/1907.09356
    Formula:  18 women, ranks 0 to 17 ~ the events they attended, ranks 18 to 31
    Wire:     nothing
    Traits:   32 ranks; symmetric; 89 edges, bipartite; degrees 2 to 14; rho = 0.0821, beta = 1.434, or 0.0903 and
              1.608 with weights='max_degree'
    Differs:  the second paper has weights='max_degree', which leaves the best visited event nothing of its own
    Spec:     social, social(weights='max_degree')
    """

    examples = ("social", "social(weights='max_degree')")

    def edges(self, size: int) -> Iterable[tuple[int, int]]:
        if size != 32:
            raise ValueError(f"{self} has 32 ranks, not {size}; use 32, or another graph such as erdos_renyi(0.2)")
        return numbered(networkx().davis_southern_women_graph(), ordering="default")
