"""Erdos-Renyi: each pair of ranks is joined with probability p.

Paper:    Erdos and Renyi, "On random graphs I", Publicationes Mathematicae 1959; Gilbert, "Random graphs", 1959
Formula:  i ~ j if u_ij < p, with u_ij uniform in [0, 1) from the seed
Wire:     nothing
Traits:   any size at which the draw is connected, which is likely where p is well above ln(n) / n; symmetric
Differs:  a draw that is not connected is refused, not drawn again; all ranks draw the same bits on any machine
Spec:     erdos_renyi(0.3), erdos_renyi(0.3, seed=1)
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations, compress
from typing import ClassVar

import torch

from gradwire.core.keys import SHARED, Key
from gradwire.core.registry import register
from gradwire.kernels.philox import uniform
from gradwire.topology.checks import reach
from gradwire.topology.graph import Undirected
from gradwire.topology.weights import neighbors


@register("erdos_renyi", kind="topology")
@dataclass(frozen=True)
class ErdosRenyi(Undirected):
    """A random graph that everybody draws alike.

    Attributes:
        p: The share of all pairs that is joined, in (0, 1].
        seed: Which draw.
        weights: See `weights`.
    """

    p: float
    seed: int = 0
    weights: str = "metropolis"
    examples: ClassVar[tuple[str, ...]] = ("erdos_renyi(0.4)", "erdos_renyi(0.5, seed=1)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.p, bool) or not isinstance(self.p, int | float) or not 0.0 < self.p <= 1.0:
            raise ValueError(f"erdos_renyi({self.p!r}) joins a share of all pairs, which must be in (0, 1]")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"erdos_renyi got seed={self.seed!r}; write a whole number, for example seed=1")

    def links(self, size: int) -> Iterable[tuple[int, int]]:
        pairs = list(combinations(range(size), 2))
        key = Key(self.seed, 0, SHARED, "topology")
        drawn = uniform(key, ("erdos_renyi",), torch.tensor([len(pairs)]))
        edges = list(compress(pairs, (drawn < self.p).tolist()))
        missing = size - len(reach(neighbors(edges, size), 0))
        if missing:
            raise ValueError(
                f"{self} on {size} ranks is disconnected: {missing} of them cannot be reached from rank 0; "
                f"change the seed, or raise p well above ln(n)/n = {math.log(size) / size:.2f}"
            )
        return edges
