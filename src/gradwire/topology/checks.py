"""What must hold of mixing weights before anybody gossips with them.

Weights are finite and not negative; columns sum to 1, so that a round keeps the sum over ranks; rows sum to 1, so that
consensus stays where it is (push-sum does without); news from every rank reaches every other; and a period of rounds
does not merely pass values round in a circle.
"""

import math
from collections.abc import Sequence
from functools import reduce
from typing import Literal

Promise = Literal["symmetric", "doubly", "column"]
Round = tuple[tuple[tuple[int, float], ...], ...]  # rank -> (peer, weight) pairs
Hears = Sequence[set[int]]  # rank -> whom it hears, perhaps itself

TOLERANCE = 1e-9


def check(name: str, promise: Promise, rounds: tuple[Round, ...]) -> None:
    """Raise a sentence unless the weights keep the promise in every round, and mix over a period."""
    if any(len(weights) != len(rounds[0]) for weights in rounds):
        raise ValueError(f"{name}: rounds have {_counts(rounds)} ranks; give every round one row for each rank")
    for weights in rounds:
        _check_entries(name, weights)
        _check_sums(name, promise, weights)
        if promise == "symmetric":
            _check_symmetry(name, weights)
    _check_connection(name, rounds)
    _check_mixing(name, rounds)


def reach(hears: Hears, start: int) -> dict[int, int]:
    """Everyone whose news gets to a rank, with the number of rounds it takes."""
    distance, frontier = {start: 0}, [start]
    while frontier:
        found = {j for i in frontier for j in hears[i] if j not in distance}
        distance.update(dict.fromkeys(found, distance[frontier[0]] + 1))
        frontier = sorted(found)
    return distance


def _check_entries(name: str, weights: Round) -> None:
    size = len(weights)
    for i, row in enumerate(weights):
        if len({j for j, _ in row}) != len(row):
            raise ValueError(f"{name}: rank {i} hears somebody twice; add the two weights up")
        for j, weight in row:
            if not 0 <= j < size:
                raise ValueError(f"{name}: rank {i} hears rank {j}, which there is not; ranks run from 0 to {size - 1}")
            if not (math.isfinite(weight) and weight >= 0.0):
                raise ValueError(f"{name}: rank {i} hears rank {j} with weight {weight}; weights are at least 0")


def _check_sums(name: str, promise: Promise, weights: Round) -> None:
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
    _sum_to_one(name, "column", columns, "let what others hear of a rank, and it of itself, sum to 1")


def _sum_to_one(name: str, kind: str, lines: list[list[float]], remedy: str) -> None:
    for rank, line in enumerate(lines):
        total = math.fsum(line)
        if abs(total - 1.0) > TOLERANCE:
            raise ValueError(f"{name}: {kind} {rank} of the weights sums to {total:.12g}, not to 1; {remedy}")


def _check_symmetry(name: str, weights: Round) -> None:
    table = [dict(row) for row in weights]
    for i, row in enumerate(table):
        for j, weight in row.items():
            back = table[j].get(i, 0.0)
            if abs(weight - back) > TOLERANCE:
                raise ValueError(
                    f"{name}: rank {i} hears rank {j} with weight {weight:.12g} but is heard with {back:.12g}; "
                    "make them equal, or declare the graph directed"
                )


def _check_connection(name: str, rounds: tuple[Round, ...]) -> None:
    supports = [_support(weights) for weights in rounds]
    hears = [set[int]().union(*them) for them in zip(*supports, strict=True)]
    for links, sentence in (
        (hears, "rank 0 never hears of rank {}"),
        (_turned(hears), "rank {} never hears of rank 0"),
    ):
        cut = set(range(len(links))) - reach(links, 0).keys()
        if cut:
            raise ValueError(
                f"{name} is disconnected: {sentence.format(min(cut))}, not even by way of others; "
                "add an edge that leads from one to the other"
            )


def _check_mixing(name: str, rounds: tuple[Round, ...]) -> None:
    supports = [_support(weights) for weights in rounds]
    if all(i in support[i] for support in supports for i in range(len(support))):
        return  # connected, and everybody keeps some of what is theirs
    period = reduce(_after, supports)
    distance = reach(period, 0)
    strong = len(distance) == len(reach(_turned(period), 0)) == len(period)
    # All closed walks have a multiple of `laps` steps; averaging needs walks of every length.
    laps = math.gcd(*(distance[i] + 1 - distance[j] for i in distance for j in period[i]))
    if not strong or laps != 1:
        raise ValueError(
            f"{name} passes values round without ever averaging them, since ranks keep too little of their own; "
            "give them a weight of their own, as weights='metropolis' does"
        )


def _turned(hears: Hears) -> list[set[int]]:
    heard: list[set[int]] = [set() for _ in hears]
    for i, them in enumerate(hears):
        for j in them:
            heard[j].add(i)
    return heard


def _counts(rounds: tuple[Round, ...]) -> str:
    return " or ".join(map(str, sorted({len(weights) for weights in rounds})))


def _support(weights: Round) -> list[set[int]]:
    return [{j for j, weight in row if weight > 0.0} for row in weights]


def _after(first: list[set[int]], then: list[set[int]]) -> list[set[int]]:
    """Whom each hears of by two rounds, one after the other."""
    return [set[int]().union(*(first[k] for k in middle)) for middle in then]
