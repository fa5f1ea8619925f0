"""One-peer exponential: the strides of the exponential graph, one in each step.

Paper:    Ying et al., "Exponential graph is provably efficient for decentralized deep training", NeurIPS 2021.
          https://arxiv.org/abs/2110.13363; Assran et al., "Stochastic gradient push for distributed deep learning",
          ICML 2019. https://arxiv.org/abs/1811.10792
Formula:  at step t, i sends to i + 2^(t mod p) mod n, p = ceil(log2 n);  w_ij = w_ii = 1/2
Wire:     nothing
Traits:   any size; directed, doubly stochastic, period p; degree 1; where n is a power of two, p rounds give the exact
          average
Differs:  ranks send ahead, as in the second paper; the first writes the same graph the other way round
Spec:     one_peer_exponential
"""

from dataclasses import dataclass
from typing import ClassVar

from gradwire.core.registry import register
from gradwire.topology.checks import Promise, Round
from gradwire.topology.graph import Graph
from gradwire.topology.graphs.exponential import strides
from gradwire.topology.weights import split


@register("one_peer_exponential", kind="topology")
@dataclass(frozen=True)
class OnePeerExponential(Graph):
    """One message each way per step, whatever the size."""

    examples: ClassVar[tuple[str, ...]] = ("one_peer_exponential",)

    @property
    def promise(self) -> Promise:
        return "doubly"

    def rounds(self, size: int) -> tuple[Round, ...]:
        if size == 1:
            return (split([set()]),)
        return tuple(split([{(i + stride) % size} for i in range(size)]) for stride in strides(size))
