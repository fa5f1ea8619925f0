"""DCD-PSGD: models move only by what was said, so everybody knows his neighbors' models exactly.

Paper:    Tang et al., "Communication compression for decentralized training", NeurIPS 2018.
          https://arxiv.org/abs/1803.06443, Algorithm 1
Formula:  z_i = s_i + (y_i - x_i) - x_i, y_i: x_i after the optimizer's step;  s_i = sum_j w_ij x_j
          q_i = C(z_i);  x_i = x_i + q_i;  s_i = s_i + sum_j w_ij q_j
Wire:     one message of the codec to each neighbor
Traits:   unbiased codecs; others by allow_biased=True. Static symmetric graphs; two more vectors. What a message loses
          of the gradient is lost: there is no consensus step, and no residual. A codec that adds noise of much more
          than |z|^2 (few levels, or random entries scaled by ten) drives replicas apart
Differs:  neighbors' models are kept as one weighted sum, not one by one
Spec:     dcd(ring), dcd(ring, allow_biased=True)
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.stage import Memory, StateSpec
from gradwire.core.registry import register
from gradwire.gossip.broadcast import BroadcastMethod, Heard
from gradwire.gossip.gossip import Gossip, GossipContext, MixResult, need_forgetful, need_symmetric
from gradwire.topology import Graph, Topology


@register("dcd", kind="gossip")
@dataclass(frozen=True)
class DCD(BroadcastMethod):
    """Difference compression.

    Attributes:
        graph: Who talks to whom.
        allow_biased: Whether to run with codecs that the analysis does not cover.
    """

    graph: Graph
    allow_biased: bool = False
    examples: ClassVar[tuple[str, ...]] = ("dcd(ring)", "dcd(ring, allow_biased=True)")
    overlaps: ClassVar[bool] = False

    def check(self, codec: Codec, topology: Topology) -> None:
        need_unbiased(self, codec, self.allow_biased)
        need_symmetric(self, topology)

    def slots(self, around: GossipContext) -> dict[str, StateSpec]:
        like = StateSpec(around.tensors.lengths)
        return {"x_hat": like, "mixed": like}

    def begin(self, common: Tensor, codec: Codec, around: GossipContext) -> dict[str, Tensor]:
        return {name: common.clone() for name in self.slots(around)}

    def words(self, x: Tensor, memory: Memory, step: int) -> Tensor:
        del step
        return memory["mixed"] + (x - memory["x_hat"]) - memory["x_hat"]

    def learn(self, x: Tensor, memory: Memory, heard: Heard, step: int) -> MixResult:
        del x, step
        x_hat = memory["x_hat"] + heard.mine
        return MixResult(x_hat, {**memory, "x_hat": x_hat, "mixed": heard.onto(memory["mixed"])})


def need_unbiased(method: Gossip, codec: Codec, allow_biased: bool) -> None:
    """Refuse what the analysis does not cover, unless it was asked for by name."""
    need_forgetful(method, codec)
    if not (codec.traits.unbiased or allow_biased):
        raise ValueError(
            f"{method.name} was made for unbiased codecs, and {codec} is none: it may diverge; "
            f"write {method.name}({method.graph}, allow_biased=True), in a recipe gossip.options.allow_biased=true, "
            "to see, or use choco"
        )
