"""NoLoCo: outer momentum around the mean over a few neighbors, without an all-reduce.

Paper:    Kolehmainen et al., "NoLoCo: no-all-reduce low communication training method for large models", 2025.
          https://arxiv.org/abs/2506.10911
Formula:  y_i = x_i + sum_j w_ij (m_j - m_i);  m_j = cast(x_j)
          w_i = w_i + momentum (w_i - wbefore_i) - rate (w_i - y_i);  x_i = w_i
Wire:     one model to each neighbor, float32 or cast to 16 bits
Traits:   casts; doubly stochastic graphs, static or not; two more vectors, w and its last value
Differs:  the paper sends differences and outer weights, which are two vectors; with one rate for both, as in its code,
          they are the sum that is sent here. Its pairs are drawn at random; on one_peer_exponential each rank takes one
          peer, and another one in each round. H is that of local_gossip
Spec:     local_gossip(noloco(one_peer_exponential), H=50), noloco(ring, rate=0.7, momentum=0.5)
"""

from torch import Tensor

from gradwire.codecs import Memory
from gradwire.core import check_argument, is_number, register
from gradwire.gossip.broadcast import NeighborMessages
from gradwire.gossip.dpsgd import WholeModels
from gradwire.gossip.gossip import MixResult


@register("noloco", kind="gossip")
class NoLoCo(WholeModels):
    """Outer weights of each rank, which follow the mean over its neighbors with momentum.

    Attributes:
        rate: Of the outer step.
        momentum: Of the outer step.
    """

    rate: float = 0.7
    momentum: float = 0.5
    examples = ("noloco(one_peer_exponential)", "noloco(ring, rate=0.5, momentum=0.3)")
    memories = ("outer", "outer_before")
    copies_parameters = True
    overlaps = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_argument(self, "rate", is_number(self.rate) and self.rate > 0.0, "a positive number")
        check_argument(self, "momentum", is_number(self.momentum) and 0.0 <= self.momentum < 1.0, "in [0, 1)")

    def update(self, x: Tensor, memory: Memory, messages: NeighborMessages, step: int) -> MixResult:
        del step
        outer = memory["outer"]
        moved = outer + self.momentum * (outer - memory["outer_before"]) - self.rate * (outer - messages.pull(x))
        return MixResult(moved, {"outer": moved, "outer_before": outer})
