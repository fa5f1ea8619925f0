"""EF21 with momentum: the estimate follows an average of gradients, so that their noise is not sent.

Paper:    Fatkhullin, Tyurin, Richtarik, "Momentum provably improves error feedback!", NeurIPS 2023.
          https://arxiv.org/abs/2305.15155, Algorithm 1 (EF21-SGDM)
Formula:  v = b v + (1 - b) g;  target = v - h;  h = h + C(target);  G = G + mean over ranks of C(target)
          the update is G;  b = 1 - eta of the paper
Wire:     nothing
Traits:   h tends to v; three floats per parameter
Differs:  v, h and G start at zero, where the paper takes a first gradient of a large batch. The optimizer behind must
          have no momentum of its own
Spec:     ef21_momentum(0.9)
"""

from typing import ClassVar

from torch import Tensor

from gradwire.codecs import Memory
from gradwire.core import check_argument, register
from gradwire.feedback.ef21 import Estimates


@register("ef21_momentum", kind="feedback")
class EF21Momentum(Estimates):
    """Compress differences of momentum; the group keeps the running mean of them.

    Attributes:
        momentum: b above.
    """

    momentum: float = 0.9
    examples = ("ef21_momentum", "ef21_momentum(momentum=0.8)")
    memories: ClassVar[dict[str, str]] = {"momentum": "mean", "estimate": "mean", "estimate_mean": "same"}

    def __post_init__(self) -> None:
        check_argument(self, "momentum", 0.0 <= self.momentum < 1.0, "in [0, 1)")

    def compensate(self, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        v = self.momentum * memory["momentum"] + (1.0 - self.momentum) * grad
        return v - memory["estimate"], {**memory, "momentum": v}
