"""Exponential: each rank sends to those 1, 2, 4, 8, ... places ahead.

Paper:    Ying et al., "Exponential graph is provably efficient for decentralized deep training", NeurIPS 2021.
          https://arxiv.org/abs/2110.13363; Assran et al., "Stochastic gradient push for distributed deep learning",
          ICML 2019. https://arxiv.org/abs/1811.10792
Formula:  i sends to i + 2^k mod n for 2^k < n;  w_ij = 1 / (1 + ceil(log2 n))
Wire:     nothing
Traits:   any size; directed, yet doubly stochastic; degree ceil(log2 n); rho = 2 / (1 + ceil(log2 n)) where n is even
Differs:  ranks send ahead, as in the second paper; the first writes the same graph the other way round
Spec:     exponential
"""

from dataclasses import dataclass
from typing import ClassVar

from gradwire.core.registry import register
from gradwire.topology.checks import Promise, Round
from gradwire.topology.graph import Graph
from gradwire.topology.weights import split


def strides(size: int) -> tuple[int, ...]:
    """1, 2, 4, ... below the size."""
    return tuple(1 << k for k in range((size - 1).bit_length()))


@register("exponential", kind="topology")
@dataclass(frozen=True)
class Exponential(Graph):
    """All strides in every step."""

    examples: ClassVar[tuple[str, ...]] = ("exponential",)

    @property
    def promise(self) -> Promise:
        return "doubly"

    def rounds(self, size: int) -> tuple[Round, ...]:
        return (split([{(i + stride) % size for stride in strides(size)} for i in range(size)]),)
