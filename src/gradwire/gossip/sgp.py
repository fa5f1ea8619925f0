"""SGP, stochastic gradient push: gossip over edges that lead one way.

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

import torch
from torch import Tensor

from gradwire.codecs import Codec, Memory, StateSpec
from gradwire.core import CommGenerator, register
from gradwire.gossip.gossip import GossipMethod, MixResult, decode_message, encode_message, send_to_all
from gradwire.gossip.message import GossipContext
from gradwire.gossip.requirements import require_cast
from gradwire.topology import Topology


@register("sgp", kind="gossip")
class SGP(GossipMethod):
    """Push-sum: weights travel with the models, and undo what an uneven graph does to them."""

    examples = ("sgp(exponential)", "sgp(one_peer_exponential)")
    overlaps = False

    def check(self, codec: Codec, topology: Topology) -> None:
        require_cast(self, codec)

    def state_specs(self, context: GossipContext) -> dict[str, StateSpec]:
        return {"pushed": StateSpec(context.tensors.lengths)}

    def initial_memory(self, common: Tensor, codec: Codec, context: GossipContext) -> dict[str, Tensor]:
        return {"pushed": common.clone(), "weight": torch.ones(1, dtype=torch.float64)}

    def mix(self, x: Tensor, memory: Memory, codec: Codec, context: GossipContext) -> CommGenerator[MixResult]:
        share = float(memory["weight"])
        pushed = memory["pushed"] + (x - memory["pushed"] / share)
        own = encode_message(pushed, codec, context)
        received = yield from send_to_all(own.payload, codec, context, (share,))
        sent = sum(context.out_weights.values())
        pushed = pushed - sent * own.decoded
        share = share - sent * float(torch.tensor(share, dtype=torch.float32))  # in float32, as headers carry it
        for peer, weight in context.in_weights.items():
            pushed = pushed + weight * decode_message(received[peer], codec, context, peer)
            share += weight * received[peer].metadata[0]
        return MixResult(pushed / share, {"pushed": pushed, "weight": torch.tensor([share], dtype=torch.float64)})
