"""Common momentum: 1-bit Adam's memory, the momentum that all ranks share.

Paper:    Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence speed",
          ICML 2021. https://arxiv.org/abs/2102.02888, Algorithm 1, lines 5 to 13
Formula:  x = g / d;  target = b m + (1 - b) x + e;  e = target - C(target)
          m = mean over ranks of C(target);  the update is d m
          d is the root of the optimizer's variance, frozen when its dense steps end
Wire:     nothing
Traits:   what was sent plus e equals what was compensated; three floats per parameter
Differs:  the paper compresses b m + (1 - b) g and divides by d afterwards. The noise of one bit is then as large for an
          entry of small variance as for its neighbors, and the division blows it up. Here the division comes first
Spec:     common_momentum(0.9)
"""

from typing import ClassVar

from torch import Tensor

from gradwire.codecs.stage import Decoded, Memory
from gradwire.core.arguments import check_argument
from gradwire.core.registry import register
from gradwire.feedback.feedback import Feedback, preconditioned


@register("common_momentum", kind="feedback")
class CommonMomentum(Feedback):
    """Send the momentum that the common one and this rank's gradient make.

    Attributes:
        beta: b above, AdamW's first.
    """

    beta: float = 0.9
    examples = ("common_momentum", "common_momentum(0.8)")
    memories: ClassVar[dict[str, str]] = {"momentum": "same", "denominator": "same", "residual": "mean"}
    needs_denominator = True

    def __post_init__(self) -> None:
        check_argument(self, "beta", 0.0 <= self.beta < 1.0, "in [0, 1), as AdamW's first beta")

    def compensate(self, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        x = preconditioned(grad, memory)
        return self.beta * memory["momentum"] + (1.0 - self.beta) * x + memory["residual"], memory

    def update_memory(self, target: Tensor, sent: Decoded, memory: Memory) -> Memory:
        return {**memory, "residual": sent.residual_of(target)}

    def finalize(self, mean: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return mean * memory["denominator"], {**memory, "momentum": mean}
