"""DeepSqueeze: gossip with compressed models, each error added to the next message.

Paper:    Tang et al., "DeepSqueeze: decentralization meets error-compensated compression", 2019.
          https://arxiv.org/abs/1907.07346, Algorithm 1
Formula:  v_i = x_i + e_i;  c_i = C(v_i);  e_i = v_i - c_i;  x_i = x_i + gamma sum_j w_ij (c_j - c_i)
Wire:     one message of the codec to each neighbor
Traits:   contractions without memory; doubly stochastic graphs, static or not; one more vector; keeps the mean over
          ranks. Whole models are compressed, not differences, so gamma must be small
Differs:  the error is taken against the decoded message, so that a sign of zero counts as its receivers hear it
Spec:     deepsqueeze(ring), deepsqueeze(ring, gamma=0.05)
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.stage import Memory, StateSpec
from gradwire.core.registry import register
from gradwire.gossip.broadcast import BroadcastMethod, Heard
from gradwire.gossip.gossip import GossipContext, MixResult, need_contraction, need_doubly, need_step
from gradwire.topology import Graph, Topology


@register("deepsqueeze", kind="gossip")
@dataclass(frozen=True)
class DeepSqueeze(BroadcastMethod):
    """Error feedback on whole models.

    Attributes:
        graph: Who talks to whom.
        gamma: The consensus step in (0, 1].
    """

    graph: Graph
    gamma: float = 0.01
    examples: ClassVar[tuple[str, ...]] = ("deepsqueeze(ring)", "deepsqueeze(ring, gamma=0.05)")

    def __post_init__(self) -> None:
        super().__post_init__()
        need_step(self.gamma, "deepsqueeze")

    def check(self, codec: Codec, topology: Topology) -> None:
        need_contraction(self, codec)
        need_doubly(self, topology)

    def slots(self, around: GossipContext) -> dict[str, StateSpec]:
        return {"residual": StateSpec(around.tensors.lengths)}

    def words(self, x: Tensor, memory: Memory, step: int) -> Tensor:
        del step
        return x + memory["residual"]

    def learn(self, x: Tensor, memory: Memory, heard: Heard, step: int) -> MixResult:
        residual = self.words(x, memory, step) - heard.mine
        return MixResult(heard.toward(x, self.gamma), {**memory, "residual": residual}, self.gamma)
