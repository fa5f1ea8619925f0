"""SGP, stochastic gradient push: gossip where nobody need hear whom he tells.

Paper:    Assran et al., "Stochastic gradient push for distributed deep learning", ICML 2019.
          https://arxiv.org/abs/1811.10792, Algorithm 1
Formula:  p_i = p_i + (y_i - z_i), y_i: z_i after the optimizer's step;  p_i = sum_j w_ij p_j;  v_i = sum_j w_ij v_j;
          z_i = p_i / v_i
Wire:     one model and one float32 weight to each out-neighbor
Traits:   casts; any connected graph whose columns sum to 1, directed or changing; one more vector and one number; keeps
          the sum of p
Differs:  what a cast loses stays with the sender, so that the sum of p is kept with 16 bits too
Spec:     sgp(exponential), sgp(one_peer_exponential)
"""

import struct
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.stage import Memory, StateSpec
from gradwire.core.registry import register
from gradwire.core.requests import CommGenerator
from gradwire.gossip.gossip import Gossip, GossipContext, MixResult, hear, need_cast, say, size_of
from gradwire.gossip.message import post
from gradwire.topology import Graph, Topology


@register("sgp", kind="gossip")
@dataclass(frozen=True)
class SGP(Gossip):
    """Push-sum: weights travel with the models, and undo what an uneven graph does to them."""

    graph: Graph
    examples: ClassVar[tuple[str, ...]] = ("sgp(exponential)", "sgp(one_peer_exponential)")
    overlaps: ClassVar[bool] = False

    def check(self, codec: Codec, topology: Topology) -> None:
        need_cast(self, codec)

    def slots(self, around: GossipContext) -> dict[str, StateSpec]:
        return {"pushed": StateSpec(around.tensors.lengths)}

    def begin(self, common: Tensor, codec: Codec, around: GossipContext) -> dict[str, Tensor]:
        return {"pushed": common.clone(), "weight": torch.ones(1, dtype=torch.float64)}

    def talk(self, x: Tensor, memory: Memory, codec: Codec, around: GossipContext) -> CommGenerator[MixResult]:
        share = float(memory["weight"])
        pushed = memory["pushed"] + (x - memory["pushed"] / share)
        mine = say(pushed, codec, around)
        size = size_of(codec, around)
        letters = yield from post(
            around.stamp(),
            dict.fromkeys(around.tells, mine.payload),
            dict.fromkeys(around.hears, size),
            (share,),
        )
        given = sum(around.tells.values())
        pushed = pushed - given * mine.heard
        kept = share - given * _float32(share)
        for peer, weight in around.hears.items():
            pushed = pushed + weight * hear(letters[peer], codec, around, peer)
            kept += weight * letters[peer].note[0]
        weight_now = torch.tensor([kept], dtype=torch.float64)
        return MixResult(pushed / kept, {**memory, "pushed": pushed, "weight": weight_now})


def _float32(number: float) -> float:
    """As a header carries it."""
    (rounded,) = struct.unpack("<f", struct.pack("<f", number))
    return float(rounded)
