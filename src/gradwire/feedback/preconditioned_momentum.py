"""Preconditioned momentum: Deep Gradient Compression's memory in front of Adam.

Paper:    the memory is that of Lin et al. (DGC, ICLR 2018); the frozen variance that of Tang et al. (1-bit Adam, ICML
          2021)
Formula:  x = g / d;  u = b u + (1 - b) x;  target = v + u
          v = target - sent;  u = 0 where a selector chose              momentum factor masking
          the update is d times the mean over ranks of what was sent
          d is the root of the optimizer's variance, frozen when its gradient steps end; at least `floor` of its mean
Wire:     nothing
Traits:   what was sent plus v equals what was compensated; three floats per parameter
Differs:  no paper; where nothing was selected (ratio 1) u is kept, and the method is Adam with a frozen variance
Spec:     preconditioned_momentum(0.9)
"""

from typing import ClassVar

from torch import Tensor

from gradwire.codecs.stage import Decoded, Memory
from gradwire.core.registry import register
from gradwire.feedback.feedback import Feedback, check_preconditioner, divisor, masked


@register("preconditioned_momentum", kind="feedback")
class PreconditionedMomentum(Feedback):
    """Accumulate Adam's steps, not gradients, in the residual.

    Attributes:
        beta: b above, AdamW's first.
        masking: Momentum factor masking.
        floor: The smallest denominator, as a share of a tensor's mean.
    """

    beta: float = 0.9
    masking: bool = True
    floor: float = 0.1
    examples = ("preconditioned_momentum", "preconditioned_momentum(0.8, masking=False)")
    memories: ClassVar[dict[str, str]] = {"momentum": "mean", "denominator": "same", "residual": "mean"}
    needs_denominator = True

    def __post_init__(self) -> None:
        check_preconditioner(self)

    def compensate(self, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        u = (self.beta * memory["momentum"]).addcdiv_(grad, divisor(memory), value=1.0 - self.beta)
        return memory["residual"] + u, {**memory, "momentum": u}

    def update_memory(self, target: Tensor, sent: Decoded, memory: Memory) -> Memory:
        return masked(target, sent, memory, self.masking)

    def finalize(self, mean: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return mean * memory["denominator"], memory
