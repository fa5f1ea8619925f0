"""What must hold of mixing weights before ranks gossip with them.

Weights are finite and not negative; columns sum to 1, so that a round keeps the sum over ranks; rows sum to 1, so that
consensus stays where it is (push-sum does without); there is a path from every rank to every other; and a period of
rounds does not merely pass values round in a circle.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

Promise = Literal["symmetric", "doubly", "column"]
MixingRows = tuple[tuple[tuple[int, float], ...], ...]  # W of a round: rank -> (peer, weight) pairs
Neighbors = Sequence[set[int]]  # rank -> its in-neighbors, perhaps itself among them

TOLERANCE = 1e-9


def networkx() -> Any:
    """Imported at the first use: it takes half a second."""
    import networkx  # type: ignore[import-untyped,unused-ignore]

    return networkx


def check(name: str, promise: Promise, rounds: tuple[MixingRows, ...]) -> None:
    """Check that the weights keep the promise in every round, and mix over a period.

    Raises:
        ValueError: They do not.
    """
    sizes = sorted({len(weights) for weights in rounds})
    if len(sizes) > 1:
        raise ValueError(
            f"{name}: rounds have {' or '.join(map(str, sizes))} ranks; give every round one row for each rank"
        )
    for weights in rounds:
        _check_entries(name, weights)
        if promise != "column":
            remedy = (
                "give each rank itself what its neighbors leave over, or declare the graph directed and use push-sum"
            )
            _check_sums(f"{name}: row", weights, remedy)
        _check_sums(f"{name}: column", transposed(weights), "let the weights that all ranks give to one rank sum to 1")
        if promise == "symmetric":
            _check_symmetry(name, weights)
    _check_connection(name, rounds)
    _check_mixing(name, rounds)


def transposed(weights: MixingRows) -> MixingRows:
    """The columns of W as rows."""
    columns: list[list[tuple[int, float]]] = [[] for _ in weights]
    for i, row in enumerate(weights):
        for j, weight in row:
            columns[j].append((i, weight))
    return tuple(map(tuple, columns))


def _check_entries(name: str, weights: MixingRows) -> None:
    size = len(weights)
    for i, row in enumerate(weights):
        if len({j for j, _ in row}) != len(row):
            raise ValueError(f"{name}: rank {i} lists a neighbor twice; add the two weights up")
        for j, weight in row:
            if not 0 <= j < size:
                raise ValueError(
                    f"{name}: rank {i} lists rank {j}, which does not exist; ranks run from 0 to {size - 1}"
                )
            if not (math.isfinite(weight) and weight >= 0.0):
                raise ValueError(f"{name}: rank {i} gives rank {j} the weight {weight}; weights are at least 0")


def _check_sums(what: str, lines: MixingRows, remedy: str) -> None:
    for rank, line in enumerate(lines):
        total = math.fsum(weight for _, weight in line)
        if abs(total - 1.0) > TOLERANCE:
            raise ValueError(f"{what} {rank} of the weights sums to {total:.12g}, not to 1; {remedy}")


def _check_symmetry(name: str, weights: MixingRows) -> None:
    table = [dict(row) for row in weights]
    for i, row in enumerate(table):
        for j, weight in row.items():
            back = table[j].get(i, 0.0)
            if abs(weight - back) > TOLERANCE:
                raise ValueError(
                    f"{name}: rank {i} gives rank {j} the weight {weight:.12g} and gets {back:.12g}; "
                    "make them equal, or declare the graph directed"
                )


def _check_connection(name: str, rounds: tuple[MixingRows, ...]) -> None:
    union = networkx().DiGraph()
    union.add_nodes_from(range(len(rounds[0])))
    union.add_edges_from((j, i) for weights in rounds for i, row in enumerate(weights) for j, w in row if w > 0.0)
    paths = {"to rank 0 from rank {}": networkx().ancestors, "to rank {} from rank 0": networkx().descendants}
    for path, reached in paths.items():
        unreached = set(union) - reached(union, 0) - {0}
        if unreached:
            raise ValueError(
                f"{name} is disconnected: there is no path {path.format(min(unreached))}; "
                "add an edge that leads from one to the other"
            )


def _check_mixing(name: str, rounds: tuple[MixingRows, ...]) -> None:
    sources = [{rank} for rank in range(len(rounds[0]))]  # of each rank's value, over the rounds so far
    supports = [[{j for j, weight in row if weight > 0.0} for row in weights] for weights in rounds]
    if all(i in them for support in supports for i, them in enumerate(support)):
        return  # connected, and every rank keeps some of its own
    for support in supports:
        sources = [set[int]().union(*(sources[j] for j in them)) for them in support]
    period = networkx().DiGraph([(j, i) for i, them in enumerate(sources) for j in them])
    if not (networkx().is_strongly_connected(period) and networkx().is_aperiodic(period)):
        raise ValueError(
            f"{name} passes values round without ever averaging them, since ranks keep too little of their own; "
            "give them a weight of their own, as weights='metropolis' does"
        )
