"""What must hold of mixing weights before ranks gossip with them.

Weights are finite and not negative; columns sum to 1, so that a round keeps the sum over ranks; rows sum to 1, so that
consensus stays where it is (push-sum does without); there is a path from every rank to every other; and a period of
rounds does not merely pass values round in a circle.
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Literal

Promise = Literal["symmetric", "doubly", "column"]
MixingRows = tuple[tuple[tuple[int, float], ...], ...]  # W of a round: rank -> (peer, weight) pairs
Neighbors = Sequence[set[int]]  # rank -> its in-neighbors, perhaps itself among them

TOLERANCE = 1e-9


def check(name: str, promise: Promise, rounds: tuple[MixingRows, ...]) -> None:
    """Check that the weights keep the promise in every round, and mix over a period.

    Raises:
        ValueError: They do not.
    """
    if any(len(weights) != len(rounds[0]) for weights in rounds):
        raise ValueError(f"{name}: rounds have {_counts(rounds)} ranks; give every round one row for each rank")
    for weights in rounds:
        _check_entries(name, weights)
        _check_sums(name, promise, weights)
        if promise == "symmetric":
            _check_symmetry(name, weights)
    _check_connection(name, rounds)
    _check_mixing(name, rounds)


def distances_from(root: int, neighbors: Neighbors) -> dict[int, int]:
    """The ranks that can be reached from ``root``, with the number of edges to each."""
    distances, frontier = {root: 0}, [root]
    while frontier:
        nearest = {j for i in frontier for j in neighbors[i] if j not in distances}
        distances.update(dict.fromkeys(nearest, distances[frontier[0]] + 1))
        frontier = sorted(nearest)
    return distances


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


def _check_sums(name: str, promise: Promise, weights: MixingRows) -> None:
    columns: list[list[float]] = [[] for _ in weights]
    for row in weights:
        for j, weight in row:
            columns[j].append(weight)
    rows = [[weight for _, weight in row] for row in weights]
    if promise != "column":
        _sum_to_one(
            name,
            "row",
            rows,
            "give each rank itself what its neighbors leave over, or declare the graph directed and use push-sum",
        )
    _sum_to_one(name, "column", columns, "let the weights that all ranks give to one rank sum to 1")


def _sum_to_one(name: str, kind: str, lines: list[list[float]], remedy: str) -> None:
    for rank, line in enumerate(lines):
        total = math.fsum(line)
        if abs(total - 1.0) > TOLERANCE:
            raise ValueError(f"{name}: {kind} {rank} of the weights sums to {total:.12g}, not to 1; {remedy}")


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
    supports = [_support(weights) for weights in rounds]
    union = [set[int]().union(*them) for them in zip(*supports, strict=True)]
    for neighbors, sentence in ((union, "to rank 0 from rank {}"), (_reversed(union), "to rank {} from rank 0")):
        unreached = set(range(len(neighbors))) - distances_from(0, neighbors).keys()
        if unreached:
            raise ValueError(
                f"{name} is disconnected: there is no path {sentence.format(min(unreached))}; "
                "add an edge that leads from one to the other"
            )


def _check_mixing(name: str, rounds: tuple[MixingRows, ...]) -> None:
    supports = [_support(weights) for weights in rounds]
    if all(i in support[i] for support in supports for i in range(len(support))):
        return  # connected, and every rank keeps some of its own
    period = reduce(_after, supports)
    distances = distances_from(0, period)
    strong = len(distances) == len(distances_from(0, _reversed(period))) == len(period)
    # All closed walks have a multiple of `laps` steps; averaging needs walks of every length.
    laps = math.gcd(*(distances[i] + 1 - distances[j] for i in distances for j in period[i]))
    if not strong or laps != 1:
        raise ValueError(
            f"{name} passes values round without ever averaging them, since ranks keep too little of their own; "
            "give them a weight of their own, as weights='metropolis' does"
        )


def _reversed(neighbors: Neighbors) -> list[set[int]]:
    out: list[set[int]] = [set() for _ in neighbors]
    for i, them in enumerate(neighbors):
        for j in them:
            out[j].add(i)
    return out


def _counts(rounds: tuple[MixingRows, ...]) -> str:
    return " or ".join(map(str, sorted({len(weights) for weights in rounds})))


def _support(weights: MixingRows) -> list[set[int]]:
    return [{j for j, weight in row if weight > 0.0} for row in weights]


def _after(first: list[set[int]], then: list[set[int]]) -> list[set[int]]:
    """The in-neighbors over two rounds, one after the other."""
    return [set[int]().union(*(first[k] for k in middle)) for middle in then]
