"""Edges: any graph of the user's, written as a list of pairs that hear each other.

Paper:    none: the weights are those of `weights`
Formula:  i ~ j for each pair (i, j)
Wire:     nothing
Traits:   the one size that its ranks have; symmetric
Differs:  as there is no paper, from nothing
Spec:     edges([(0, 1), (1, 2), (2, 0)])
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from gradwire.core.registry import register
from gradwire.topology.graph import Undirected

Pairs = tuple[tuple[int, int], ...]


def pairs(name: str, given: Iterable[Iterable[int]]) -> Pairs:
    """The user's list as a value, or what is wrong with it."""
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


def fit(name: str, listed: Pairs, size: int) -> None:
    """Refuse a size that the pairs do not speak of."""
    most = 1 + max((rank for pair in listed for rank in pair), default=0)
    if size < most:
        raise ValueError(f"{name} speaks of rank {most - 1}, so it has {most} ranks, not {size}")


@register("edges", kind="topology")
@dataclass(frozen=True)
class Edges(Undirected):
    """Pairs, in either order; one that is listed twice counts once."""

    listed: Pairs
    weights: str = "metropolis"
    examples: ClassVar[tuple[str, ...]] = ("edges([(0, 1), (1, 2), (2, 0), (2, 3)])", "edges([])")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "listed", pairs("edges", self.listed))

    def links(self, size: int) -> Iterable[tuple[int, int]]:
        fit("edges", self.listed, size)
        return self.listed
