"""DeepSqueeze: gossip with compressed models, each error added to the next message.

Paper:    Tang et al., "DeepSqueeze: decentralization meets error-compensated compression", 2019.
          https://arxiv.org/abs/1907.07346, Algorithm 1
Formula:  v_i = x_i + e_i;  c_i = C(v_i);  e_i = v_i - c_i;  x_i = x_i + gamma sum_j w_ij (c_j - c_i)
Wire:     one message of the codec to each neighbor
Traits:   contractions without memory; doubly stochastic graphs, static or not; one more vector; keeps the mean over
          ranks. Whole models are compressed, not differences, so gamma must be small
Differs:  the error is taken against the decoded message, so that a sign of zero counts as its receivers decode it
Spec:     deepsqueeze(ring), deepsqueeze(ring, gamma=0.05)
"""

from torch import Tensor

from gradwire.codecs import Codec, Memory
from gradwire.core import register
from gradwire.gossip.broadcast import BroadcastMethod, NeighborMessages
from gradwire.gossip.gossip import MixResult
from gradwire.gossip.requirements import require_consensus_step, require_contraction, require_doubly_stochastic
from gradwire.topology import Topology


@register("deepsqueeze", kind="gossip")
class DeepSqueeze(BroadcastMethod):
    """Error feedback on whole models.

    Attributes:
        gamma: The consensus step in (0, 1].
    """

    gamma: float = 0.01
    examples = ("deepsqueeze(ring)", "deepsqueeze(ring, gamma=0.05)")
    memories = ("residual",)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_consensus_step(self.gamma, "deepsqueeze")

    def check(self, codec: Codec, topology: Topology) -> None:
        require_contraction(self, codec)
        require_doubly_stochastic(self, topology)

    def message(self, x: Tensor, memory: Memory, step: int) -> Tensor:
        del step
        return x + memory["residual"]

    def update(self, x: Tensor, memory: Memory, messages: NeighborMessages, step: int) -> MixResult:
        residual = self.message(x, memory, step) - messages.own
        return MixResult(messages.pull(x, self.gamma), {**memory, "residual": residual}, self.gamma)
