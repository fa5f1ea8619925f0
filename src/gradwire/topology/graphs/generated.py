"""The graphs that we build ourselves.

networkx draws random graphs from Python's generator, where all ranks need the same bits on any machine; its circulant
graphs have edges both ways, where the exponential ones are directed; and its rings of cliques are all of one size.
"""

import math
from collections.abc import Iterable
from itertools import combinations, compress

import torch

from gradwire.core import Key, check_argument, check_fraction, is_count, register
from gradwire.core.keys import SHARED
from gradwire.kernels.philox import uniform
from gradwire.topology.checks import MixingRows, networkx
from gradwire.topology.graph import Graph, Undirected
from gradwire.topology.weights import split

__all__ = ["DataCenter", "ErdosRenyi", "Exponential", "OnePeerExponential"]


@register("datacenter", kind="topology")
class DataCenter(Undirected):
    """Complete inside each group of ranks, a ring of single edges between the groups.

    Paper:    Koloskova et al., "Decentralized deep learning with arbitrary communication compression", ICLR 2020.
              https://arxiv.org/abs/1907.09356, the data-center experiment
    Formula:  i ~ j inside a group;  the last rank of a group ~ the first of the next, and of the last ~ that of the
              first
    Wire:     nothing
    Traits:   any size from the number of groups on; symmetric; two slow edges per group, whatever its size
    Differs:  the paper leaves open which ranks hold the edges between groups; groups are runs of ranks as launchers
              number them, the first ones larger by one where the size does not divide
    Spec:     datacenter(4)

    Attributes:
        groups: How many groups, for example machines.
        weights: See `weights`.
    """

    groups: int
    weights: str = "metropolis"
    examples = ("datacenter(1)", "datacenter(2)", "datacenter(4)")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_argument(self, "groups", is_count(self.groups), "a number of groups, at least 1, as in datacenter(4)")

    def edges(self, size: int) -> Iterable[tuple[int, int]]:
        if size < self.groups:
            raise ValueError(f"{self} has at least one rank in each group; use {self.groups} ranks or more, not {size}")
        short, longer = divmod(size, self.groups)
        starts = [g * short + min(g, longer) for g in range(self.groups + 1)]
        for g in range(self.groups):
            yield from combinations(range(starts[g], starts[g + 1]), 2)
            if self.groups > 1:
                yield starts[g + 1] - 1, starts[g + 1] % size


@register("erdos_renyi", kind="topology")
class ErdosRenyi(Undirected):
    """A random graph, the same on all ranks: each pair is joined with probability p.

    Paper:    Erdos and Renyi, "On random graphs I", Publicationes Mathematicae 1959; Gilbert, "Random graphs", 1959
    Formula:  i ~ j if u_ij < p, with u_ij uniform in [0, 1) from the seed
    Wire:     nothing
    Traits:   any size at which the draw is connected, which is likely where p is well above ln(n) / n; symmetric
    Differs:  a draw that is not connected is refused, not drawn again; all ranks draw the same bits on any machine
    Spec:     erdos_renyi(0.3), erdos_renyi(0.3, seed=1)

    Attributes:
        p: The share of all pairs that is joined, in (0, 1].
        seed: Which draw.
        weights: See `weights`.
    """

    p: float
    seed: int = 0
    weights: str = "metropolis"
    examples = ("erdos_renyi(0.4)", "erdos_renyi(0.5, seed=1)")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fraction(self, "p", "erdos_renyi(0.3)")
        check_argument(self, "seed", type(self.seed) is int, "an integer; write a whole number such as 1")

    def edges(self, size: int) -> Iterable[tuple[int, int]]:
        pairs = list(combinations(range(size), 2))
        key = Key(self.seed, 0, SHARED, "topology")
        drawn = uniform(key, ("erdos_renyi",), torch.tensor([len(pairs)]))
        edges = list(compress(pairs, (drawn < self.p).tolist()))
        missing = size - len(networkx().node_connected_component(networkx().Graph([(0, 0), *edges]), 0))
        if missing:
            raise ValueError(
                f"{self} on {size} ranks is disconnected: no path leads from rank 0 to {missing} of them; "
                f"change the seed, or raise p well above ln(n)/n = {math.log(size) / size:.2f}"
            )
        return edges


@register("exponential", kind="topology")
class Exponential(Graph):
    """Each rank sends to those 1, 2, 4, 8, ... places ahead, in every step.

    Paper:    Ying et al., "Exponential graph is provably efficient for decentralized deep training", NeurIPS 2021.
              https://arxiv.org/abs/2110.13363; Assran et al., "Stochastic gradient push for distributed deep
              learning", ICML 2019. https://arxiv.org/abs/1811.10792
    Formula:  i sends to i + 2^k mod n for 2^k < n;  w_ij = 1 / (1 + ceil(log2 n))
    Wire:     nothing
    Traits:   any size; directed, yet doubly stochastic; degree ceil(log2 n); rho = 2 / (1 + ceil(log2 n)) where n is
              even
    Differs:  ranks send ahead, as in the second paper; the first writes the same graph the other way round
    Spec:     exponential
    """

    promise = "doubly"
    examples = ("exponential",)

    def rounds(self, size: int) -> tuple[MixingRows, ...]:
        return (split([{(i + stride) % size for stride in strides(size)} for i in range(size)]),)


@register("one_peer_exponential", kind="topology")
class OnePeerExponential(Graph):
    """The strides of the exponential graph, one in each step: one message each way, whatever the size.

    Paper:    Ying et al., "Exponential graph is provably efficient for decentralized deep training", NeurIPS 2021.
              https://arxiv.org/abs/2110.13363; Assran et al., "Stochastic gradient push for distributed deep
              learning", ICML 2019. https://arxiv.org/abs/1811.10792
    Formula:  at step t, i sends to i + 2^(t mod p) mod n, p = ceil(log2 n);  w_ij = w_ii = 1/2
    Wire:     nothing
    Traits:   any size; directed, doubly stochastic, period p; degree 1; where n is a power of two, p rounds give the
              exact average
    Differs:  ranks send ahead, as in the second paper; the first writes the same graph the other way round
    Spec:     one_peer_exponential
    """

    promise = "doubly"
    examples = ("one_peer_exponential",)

    def rounds(self, size: int) -> tuple[MixingRows, ...]:
        if size == 1:
            return (split([set()]),)
        return tuple(split([{(i + stride) % size} for i in range(size)]) for stride in strides(size))


def strides(size: int) -> tuple[int, ...]:
    """1, 2, 4, ... below the size."""
    return tuple(1 << k for k in range((size - 1).bit_length()))
