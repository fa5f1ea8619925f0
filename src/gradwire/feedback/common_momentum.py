"""Common momentum: 1-bit Adam's memory, the momentum that all ranks share.

Paper:    Tang et al., "1-bit Adam: communication efficient large-scale training with Adam's convergence speed",
          ICML 2021. https://arxiv.org/abs/2102.02888, Algorithm 1, lines 5 to 13
Formula:  x = g / d;  target = b m + (1 - b) x + e;  e = target - C(target)
          m = mean over ranks of C(target);  the update is d m
          divide='after': x = g, and the update is m
          d is the root of the optimizer's variance, frozen when its gradient steps end; at least `floor` of its mean
Wire:     nothing
Traits:   what was sent plus e equals what was compensated; three floats per parameter
Differs:  the paper compresses b m + (1 - b) g and divides by d afterwards, as with divide='after'. The noise of one bit
          is then as large for an entry of small variance as for its neighbors, and the division blows it up. By
          default the division comes first. The floor is an addition, too; floor=0 is the paper's
Spec:     common_momentum(0.9), common_momentum(divide='after', floor=0.3)
"""

from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs import Memory
from gradwire.core import check_argument, register
from gradwire.feedback.feedback import Averaging, ResidualFeedback, check_preconditioner


@register("common_momentum", kind="feedback")
class CommonMomentum(ResidualFeedback):
    """Send the common momentum, moved by this rank's gradient.

    Attributes:
        beta: b above, AdamW's first.
        floor: The smallest denominator, as a share of a tensor's mean.
        divide: By the denominator, ``before`` or ``after`` compression.
    """

    beta: float = 0.9
    floor: float = 0.1
    divide: str = "before"
    examples = ("common_momentum", "common_momentum(beta=0.8, floor=0.3)", "common_momentum(divide='after')")
    memories: ClassVar[dict[str, str]] = {"momentum": "same", "denominator": "same", "residual": "mean"}
    needs_denominator = True
    mean_memory = "momentum"

    def __post_init__(self) -> None:
        check_preconditioner(self)
        check_argument(self, "divide", self.divide in ("before", "after"), "'before' or 'after' (compression)")

    @property
    def averaging(self) -> Averaging:  # type: ignore[override]
        return Averaging(self.beta, self.divide == "before", False)

    def compensate(self, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return self.averaging.of(grad, memory) + memory["residual"], memory

    def finalize(self, mean: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return self.finalize_into(mean, memory, torch.empty_like(mean))

    def finalize_into(self, mean: Tensor, memory: Memory, out: Tensor) -> tuple[Tensor, Memory]:
        update = torch.mul(mean, memory["denominator"], out=out) if self.divide == "before" else mean
        return update, {**memory, "momentum": mean}
