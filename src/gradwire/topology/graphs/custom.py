"""The graphs that a user writes out: pairs of ranks, or mixing weights."""

from collections.abc import Iterable

from torch import Tensor

from gradwire.core import register
from gradwire.topology.checks import MixingRows, Promise
from gradwire.topology.graph import Graph, Undirected
from gradwire.topology.topology import sparse_rows
from gradwire.topology.weights import split

__all__ = ["Arrows", "Edges", "Matrix"]

Pairs = tuple[tuple[int, int], ...]


def pairs(name: str, given: Iterable[Iterable[int]]) -> Pairs:
    """The user's list as a value.

    Raises:
        ValueError: It is no list of pairs of different ranks.
    """
    remedy = f"write {name}([(0, 1), (1, 2)])"
    try:
        listed = tuple(tuple(pair) for pair in given)
    except TypeError:
        raise ValueError(f"{name}({given!r}) is no list of pairs; {remedy}") from None
    for pair in listed:
        if len(pair) != 2 or not all(type(rank) is int and rank >= 0 for rank in pair):
            raise ValueError(f"{name}: {pair!r} is no pair of ranks; {remedy}")
        if pair[0] == pair[1]:
            raise ValueError(f"{name}: {pair!r} joins a rank to itself; leave it out, the rest is its own anyway")
    return listed  # type: ignore[return-value]


def require_size(name: str, listed: Pairs, size: int) -> None:
    """Refuse a size that is too small for the listed ranks."""
    least = 1 + max((rank for pair in listed for rank in pair), default=0)
    if size < least:
        raise ValueError(f"{name} lists rank {least - 1}, so it has {least} ranks, not {size}")


@register("edges", kind="topology")
class Edges(Undirected):
    """Any undirected graph, as a list of pairs in either order; a pair that is listed twice counts once.

    Paper:    none: the weights are those of `weights`
    Formula:  i ~ j for each pair (i, j)
    Wire:     nothing
    Traits:   the one size that its ranks have; symmetric
    Differs:  no paper
    Spec:     edges([(0, 1), (1, 2), (2, 0)])
    """

    listed: Pairs
    weights: str = "metropolis"
    examples = ("edges([(0, 1), (1, 2), (2, 0), (2, 3)])", "edges([])")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "listed", pairs("edges", self.listed))

    def edges(self, size: int) -> Iterable[tuple[int, int]]:
        require_size("edges", self.listed, size)
        return self.listed


@register("arrows", kind="topology")
class Arrows(Graph):
    """Any directed graph, as a list of pairs (from, to).

    Paper:    Nedic and Olshevsky, "Distributed optimization over time-varying directed graphs", IEEE TAC 2015; Assran
              et al., "Stochastic gradient push for distributed deep learning", ICML 2019.
              https://arxiv.org/abs/1811.10792
    Formula:  j sends to i for each pair (j, i);  w_ij = w_jj = 1 / (1 + number of those j sends to)
    Wire:     nothing
    Traits:   the one size that its ranks have; column-stochastic, so push-sum can use it; plain gossip can only where
              rows sum to 1 too
    Differs:  as in the papers
    Spec:     arrows([(0, 1), (1, 2), (2, 0)])
    """

    listed: Pairs
    promise = "column"
    examples = (
        "arrows([(0, 1), (1, 2), (2, 0)])",
        "arrows([(0, 1), (0, 2), (1, 2), (2, 0)])",
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "listed", pairs("arrows", self.listed))

    def rounds(self, size: int) -> tuple[MixingRows, ...]:
        require_size("arrows", self.listed, size)
        return (split([{to for source, to in self.listed if source == rank} for rank in range(size)]),)


@register("matrix", kind="topology")
class Matrix(Graph):
    """Any mixing weights, written out in full.

    Paper:    none: the weights are the user's
    Formula:  w_ij = rows[i][j], the weight that i gives to j
    Wire:     nothing
    Traits:   the one size that it has; doubly stochastic, or column-stochastic alone where directed=True
    Differs:  no paper
    Spec:     matrix([[0.5, 0.5], [0.5, 0.5]]), matrix([[0.5, 1.0], [0.5, 0.0]], directed=True)

    Attributes:
        rows: W, as nested lists or a tensor.
        directed: Whether columns alone sum to 1, as push-sum asks, and rows need not.
    """

    rows: tuple[tuple[float, ...], ...]
    directed: bool = False
    examples = (
        "matrix([[0.5, 0.5], [0.5, 0.5]])",
        "matrix([[0.5, 1.0], [0.5, 0.0]], directed=True)",
    )

    def __post_init__(self) -> None:
        given = self.rows.tolist() if isinstance(self.rows, Tensor) else self.rows
        try:
            rows = tuple(tuple(float(weight) for weight in row) for row in given)
        except (TypeError, ValueError):
            raise ValueError("matrix needs rows of numbers; write matrix([[0.5, 0.5], [0.5, 0.5]])") from None
        for i, row in enumerate(rows):
            if len(row) != len(rows):
                raise ValueError(f"matrix has {len(rows)} rows, but row {i} has {len(row)} entries; it must be square")
        object.__setattr__(self, "rows", rows)

    @property
    def promise(self) -> Promise:
        return "column" if self.directed else "doubly"

    def rounds(self, size: int) -> tuple[MixingRows, ...]:
        if size != len(self.rows):
            raise ValueError(f"matrix has {len(self.rows)} rows, so it has as many ranks, not {size}")
        return (sparse_rows(self.rows),)
