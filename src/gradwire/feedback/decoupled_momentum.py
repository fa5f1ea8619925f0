"""Decoupled momentum: DeMo's memory. Momentum stays on its rank but for its fast components, whose sign is applied.

Paper:    Peng, Quesnelle, Kingma, "DeMo: decoupled momentum optimization", 2024. https://arxiv.org/abs/2411.19870,
          Algorithm 1
Formula:  target = b e + g;  e = target - C(target);  the update is sign(mean over ranks of C(target))
Wire:     nothing
Traits:   what was sent plus e equals what was compensated; one float per parameter
Differs:  e is in units of gradients, where the reference code multiplies by the learning rate first; the mean of
          components is over all ranks, there over those that sent them. Plain SGD applies the update, with its weight
          decay
Spec:     decoupled_momentum(0.999)
"""

from typing import ClassVar

from torch import Tensor

from gradwire.codecs import Memory
from gradwire.core import check_argument, register
from gradwire.feedback.feedback import ResidualFeedback


@register("decoupled_momentum", kind="feedback")
class DecoupledMomentum(ResidualFeedback):
    """Send the fastest changes of momentum, and step by signs.

    Attributes:
        momentum: b above.
    """

    momentum: float = 0.999
    examples = ("decoupled_momentum", "decoupled_momentum(momentum=0.95)")
    memories: ClassVar[dict[str, str]] = {"residual": "mean"}

    def __post_init__(self) -> None:
        check_argument(self, "momentum", 0.0 <= self.momentum <= 1.0, "in [0, 1]")

    def compensate(self, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return grad + self.momentum * memory["residual"], memory

    def finalize(self, mean: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return mean.sign(), memory
