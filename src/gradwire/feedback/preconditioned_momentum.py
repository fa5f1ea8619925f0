"""Preconditioned momentum: Deep Gradient Compression's memory in front of Adam.

Paper:    the memory is that of Lin et al. (DGC, ICLR 2018); the frozen variance that of Tang et al. (1-bit Adam, ICML
          2021)
Formula:  x = g / d;  u = b u + (1 - b) x;  target = decay v + u
          v = target - sent
          masking=True: u = 0 where a selector chose                    momentum factor masking
          the update is d times the mean over ranks of what was sent
          d is the root of the optimizer's variance, frozen when its gradient steps end; at least `floor` of its mean
Wire:     nothing
Traits:   what was sent plus v equals what was compensated; three floats per parameter
Differs:  no paper; with ratio 1 the method is Adam with a frozen variance. DGC masks momentum, and so does the
          preset dgc_adam; here it is a choice. What u still has to give, b / (1 - b) u, is lost where it is masked:
          nearly all of a gradient where entries are sent often
Spec:     preconditioned_momentum(0.9)
"""

from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs import Entries, Memory
from gradwire.core import check_argument, register
from gradwire.core.layout import Flat
from gradwire.feedback.feedback import Averaging, MaskingFeedback, check_preconditioner
from gradwire.kernels.fused import Accumulation
from gradwire.kernels.momentum import scatter_product_


@register("preconditioned_momentum", kind="feedback")
class PreconditionedMomentum(MaskingFeedback):
    """Accumulate Adam's steps, not gradients, in the residual.

    Attributes:
        beta: b above, AdamW's first.
        masking: Momentum factor masking.
        floor: The smallest denominator, as a share of a tensor's mean.
        decay: The share of the error that is kept from step to step.
    """

    beta: float = 0.9
    masking: bool = False
    floor: float = 0.1
    decay: float = 1.0
    examples = (
        "preconditioned_momentum",
        "preconditioned_momentum(0.8, masking=True)",
        "preconditioned_momentum(decay=0.99)",
    )
    memories: ClassVar[dict[str, str]] = {"momentum": "mean", "denominator": "same", "residual": "mean"}
    needs_denominator = True
    takes_scattered = True

    def __post_init__(self) -> None:
        check_preconditioner(self)
        check_argument(self, "decay", 0.0 < self.decay <= 1.0, "in (0, 1]")

    @property
    def averaging(self) -> Averaging:  # type: ignore[override]
        return Averaging(self.beta, True, True, Accumulation(decay=self.decay))

    def compensate(self, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        u = self.averaging.of(grad, memory)
        return self.decay * memory["residual"] + u, {**memory, "momentum": u}

    def finalize(self, mean: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return mean * memory["denominator"], memory

    def finalize_into(self, mean: Tensor, memory: Memory, out: Tensor) -> tuple[Tensor, Memory]:
        return torch.mul(mean, memory["denominator"], out=out), memory

    def finalize_entries(self, mean: Entries, memory: Memory, out: Flat) -> tuple[Flat, Memory]:
        """Only the denominators of entries are read."""
        scatter_product_(out, *mean, mean.ranks, memory["denominator"])
        return out, memory
