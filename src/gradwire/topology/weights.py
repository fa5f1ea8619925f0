"""Mixing weights: how much each rank takes of its neighbors' parameters.

Paper:    Xiao, Boyd, Lall, "A scheme for robust distributed sensor fusion based on average consensus", IPSN 2005
          (metropolis); Koloskova et al., "Decentralized deep learning with arbitrary communication compression", ICLR
          2020. https://arxiv.org/abs/1907.09356 (max_degree, on its social graph)
Formula:  metropolis   w_ij = 1 / (1 + max(d_i, d_j))
          uniform      w_ij = 1 / (1 + d), where all ranks have the same degree d
          max_degree   w_ij = 1 / max(d_i, d_j), a loop counted once in d
          w_ii = 1 - sum over j of w_ij
Wire:     nothing
Traits:   symmetric and doubly stochastic on any undirected graph
Differs:  with max_degree a rank may keep nothing of its own; where no rank keeps any and the graph is bipartite,
          values would swing to and fro for ever, and the graph is refused
Spec:     ring(weights='uniform'), social(weights='max_degree')
"""

import math
from collections.abc import Iterable

from gradwire.topology.checks import MixingRows, Neighbors

EXTRA = {"metropolis": 1, "uniform": 1, "max_degree": 0}  # by rule: what is added to the larger degree


def neighbors(pairs: Iterable[tuple[int, int]], size: int) -> list[set[int]]:
    """The neighbors of each rank if edges lead both ways. Double edges are merged; loops are kept."""
    table: list[set[int]] = [set() for _ in range(size)]
    for a, b in pairs:
        table[a].add(b)
        table[b].add(a)
    return table


def weigh(neighbors: Neighbors, rule: str, name: str) -> MixingRows:
    """The rows of W, by the rule of that name."""
    extra = EXTRA[rule]
    degrees = [len(them - {i} if extra else them) for i, them in enumerate(neighbors)]
    if rule == "uniform" and len(set(degrees)) > 1:
        raise ValueError(
            f"{name} on {len(neighbors)} ranks has degrees {min(degrees)} to {max(degrees)}; weights='uniform' needs "
            "them equal; write weights='metropolis'"
        )
    rows = []
    for i, them in enumerate(neighbors):
        row = {j: 1.0 / (extra + max(degrees[i], degrees[j])) for j in them if j != i}
        rows.append(tuple(sorted({**row, i: rest(row.values())}.items())))
    return tuple(rows)


def split(sends: Neighbors) -> MixingRows:
    """The rows of W where each rank divides itself evenly among itself and those it sends to: columns sum to 1."""
    share = [1.0 / (1 + len(them)) for them in sends]
    rows: list[dict[int, float]] = [{i: share[i]} for i in range(len(sends))]
    for j, them in enumerate(sends):
        for i in them:
            rows[i][j] = share[j]
    return tuple(tuple(sorted(row.items())) for row in rows)


def rest(weights: Iterable[float]) -> float:
    """What the neighbors leave over; rounding errors round zero are zero."""
    left = 1.0 - math.fsum(weights)
    return left if abs(left) > 1e-12 else 0.0


def require_rule(rule: str) -> None:
    """Refuse the name of an unknown rule."""
    if rule not in EXTRA:
        raise ValueError(f"there are no weights={rule!r}; write weights='metropolis', 'uniform' or 'max_degree'")
