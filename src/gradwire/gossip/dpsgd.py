"""D-PSGD: take a local step, then the weighted mean of one's neighbors.

Paper:    Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NeurIPS 2017.
          https://arxiv.org/abs/1705.09056, Algorithm 1
Formula:  x_i = x_i + sum_j w_ij (m_j - m_i);  m_j = cast(x_j)
Wire:     one model to each neighbor, float32 or cast to 16 bits
Traits:   casts; doubly stochastic graphs, static or not; no memory; keeps the mean over ranks
Differs:  the local step comes before the averaging, so that neighbors hear of it at once, where the paper averages x
          and adds the gradient taken before; what a cast loses cancels in the mean
Spec:     dpsgd(ring), dpsgd(one_peer_exponential)
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.stage import Memory
from gradwire.core.asks import Talk
from gradwire.core.registry import register
from gradwire.gossip.gossip import Around, Gossip, Met, hear, need_cast, need_doubly, say, size_of
from gradwire.gossip.letter import post
from gradwire.topology import Graph, Topology


@register("dpsgd", kind="gossip")
@dataclass(frozen=True)
class DPSGD(Gossip):
    """Average whole models with the neighbors."""

    graph: Graph
    examples: ClassVar[tuple[str, ...]] = ("dpsgd(ring)", "dpsgd(one_peer_exponential)")
    elastic: ClassVar[bool] = True

    def check(self, codec: Codec, topology: Topology) -> None:
        need_cast(self, codec)
        need_doubly(self, topology)

    def talk(self, x: Tensor, memory: Memory, codec: Codec, around: Around) -> Talk[Met]:
        mine = say(x, codec, around)
        size = size_of(codec, around)
        letters = yield from post(
            around.stamp(), dict.fromkeys(around.tells, mine.payload), dict.fromkeys(around.hears, size)
        )
        for peer, weight in around.hears.items():
            if peer in letters:
                x = x + weight * (hear(letters[peer], codec, around, peer) - mine.heard)
        return Met(x, memory)
