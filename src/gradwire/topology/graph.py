"""Graph: a family of topologies, one for each size; what a spec names. ``Ring().on(8)`` is a ring of 8 ranks."""

from abc import abstractmethod
from collections.abc import Iterable
from typing import ClassVar

from gradwire.core import Named, is_count, parse, registered
from gradwire.topology.checks import MixingRows, Promise
from gradwire.topology.topology import Topology
from gradwire.topology.weights import neighbors, require_rule, weigh


class Graph(Named):
    """A frozen rule that gives the mixing weights of a graph of any size it can have."""

    @property
    @abstractmethod
    def promise(self) -> Promise:
        """What its weights are checked for."""

    @abstractmethod
    def rounds(self, size: int) -> tuple[MixingRows, ...]:
        """The weights of each round.

        Raises:
            ValueError: The graph has no such size.
        """

    def on(self, size: int) -> Topology:
        """The graph on that many ranks, checked."""
        if not is_count(size):
            raise ValueError(f"{self} cannot have {size!r} ranks; a graph has at least 1")
        return Topology(str(self), self.promise, self.rounds(size))


class Undirected(Graph):
    """A static graph whose edges lead both ways, weighted by one of the rules of `weights`."""

    weights: str
    promise: ClassVar[Promise] = "symmetric"

    def __post_init__(self) -> None:
        require_rule(self.weights)

    @abstractmethod
    def edges(self, size: int) -> Iterable[tuple[int, int]]:
        """The edges, in any order; double ones are merged."""

    def rounds(self, size: int) -> tuple[MixingRows, ...]:
        return (weigh(neighbors(self.edges(size), size), self.weights, str(self)),)


def graph(spec: str | Graph) -> Graph:
    """A graph from its text, or itself."""
    made = parse(spec) if isinstance(spec, str) else spec
    if not isinstance(made, Graph):
        raise ValueError(
            f"{spec!r} is no graph but a {getattr(made, 'kind', type(made).__name__)}; "
            f"write one of {', '.join(registered('topology'))}"
        )
    return made
