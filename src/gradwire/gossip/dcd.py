"""DCD-PSGD: models move only by what was sent, so that all ranks know their neighbors' models exactly.

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

from typing import ClassVar

from torch import Tensor

from gradwire.codecs.stage import Memory
from gradwire.core.registry import register
from gradwire.gossip.broadcast import NeighborMessages
from gradwire.gossip.gossip import MixResult
from gradwire.gossip.unbiased import UnbiasedMethod


@register("dcd", kind="gossip")
class DCD(UnbiasedMethod):
    """Difference compression."""

    examples: ClassVar[tuple[str, ...]] = ("dcd(ring)", "dcd(ring, allow_biased=True)")
    memories: ClassVar[tuple[str, ...]] = ("x_hat", "mixed")

    def message(self, x: Tensor, memory: Memory, step: int) -> Tensor:
        del step
        return memory["mixed"] + (x - memory["x_hat"]) - memory["x_hat"]

    def update(self, x: Tensor, memory: Memory, messages: NeighborMessages, step: int) -> MixResult:
        del x, step
        x_hat = memory["x_hat"] + messages.own
        return MixResult(x_hat, {**memory, "x_hat": x_hat, "mixed": messages.added_to(memory["mixed"])})
