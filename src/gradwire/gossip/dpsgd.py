"""D-PSGD: a local step, then the weighted mean over the neighbors.

Paper:    Lian et al., "Can decentralized algorithms outperform centralized algorithms?", NeurIPS 2017.
          https://arxiv.org/abs/1705.09056, Algorithm 1
Formula:  x_i = x_i + sum_j w_ij (m_j - m_i);  m_j = cast(x_j)
Wire:     one model to each neighbor, float32 or cast to 16 bits
Traits:   casts; doubly stochastic graphs, static or not; no memory; keeps the mean over ranks
Differs:  the local step comes before the averaging, so that neighbors receive it at once, where the paper averages
          x and adds the gradient taken before; what a cast loses cancels in the mean
Spec:     dpsgd(ring), dpsgd(one_peer_exponential)
"""

from torch import Tensor

from gradwire.codecs import Codec, Memory
from gradwire.core import register
from gradwire.gossip.broadcast import BroadcastMethod, NeighborMessages
from gradwire.gossip.gossip import MixResult
from gradwire.gossip.requirements import require_cast, require_doubly_stochastic
from gradwire.topology import Topology


class WholeModels(BroadcastMethod):
    """A method that sends whole models."""

    def check(self, codec: Codec, topology: Topology) -> None:
        require_cast(self, codec)
        require_doubly_stochastic(self, topology)

    def message(self, x: Tensor, memory: Memory, step: int) -> Tensor:
        del memory, step
        return x


@register("dpsgd", kind="gossip")
class DPSGD(WholeModels):
    """Average whole models with the neighbors."""

    examples = ("dpsgd(ring)", "dpsgd(one_peer_exponential)")
    elastic = True

    def update(self, x: Tensor, memory: Memory, messages: NeighborMessages, step: int) -> MixResult:
        del step
        return MixResult(messages.pull(x), memory)
