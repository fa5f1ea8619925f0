"""Preconditioned momentum: Deep Gradient Compression's memory in front of Adam.

Paper:    the memory is that of Lin et al. (DGC, ICLR 2018); the frozen variance that of Tang et al. (1-bit Adam, ICML
          2021)
Formula:  x = g / d;  u = b u + (1 - b) x;  target = v + u
          v = target - sent;  u = 0 where a selector chose              momentum factor masking
          the update is d times the mean over ranks of what was sent
          d is the root of the optimizer's variance, frozen when its dense steps end
Wire:     nothing
Traits:   what was sent plus v equals what was compensated; three floats per parameter
Differs:  no paper; where nothing was selected (ratio 1) u is kept, and the method is Adam with a frozen variance
Spec:     preconditioned_momentum(0.9)
"""

from typing import ClassVar

from torch import Tensor

from gradwire.codecs.stage import Decoded, Memory
from gradwire.core.arguments import check_argument
from gradwire.core.registry import register
from gradwire.feedback.feedback import Feedback, preconditioned


@register("preconditioned_momentum", kind="feedback")
class PreconditionedMomentum(Feedback):
    """Accumulate Adam's steps, not gradients, in the residual.

    Attributes:
        beta: b above, AdamW's first.
        masking: Momentum factor masking.
    """

    beta: float = 0.9
    masking: bool = True
    examples = ("preconditioned_momentum", "preconditioned_momentum(0.8, masking=False)")
    memories: ClassVar[dict[str, str]] = {"momentum": "mean", "denominator": "same", "residual": "mean"}
    needs_denominator = True

    def __post_init__(self) -> None:
        check_argument(self, "beta", 0.0 <= self.beta < 1.0, "in [0, 1), as AdamW's first beta")

    def compensate(self, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        u = self.beta * memory["momentum"] + (1.0 - self.beta) * preconditioned(grad, memory)
        return memory["residual"] + u, {**memory, "momentum": u}

    def update_memory(self, target: Tensor, sent: Decoded, memory: Memory) -> Memory:
        u = memory["momentum"]
        if self.masking and sent.indices is not None:
            u = u.index_fill(0, sent.indices, 0.0)
        return {**memory, "momentum": u, "residual": sent.residual_of(target)}

    def finalize(self, mean: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return mean * memory["denominator"], memory
