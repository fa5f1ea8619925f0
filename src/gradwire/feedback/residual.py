"""Error feedback: send in the next step what could not be sent in this one.

Paper:    Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al., "Error feedback fixes
          SignSGD and other gradient compression schemes", ICML 2019. https://arxiv.org/abs/1901.09847
Formula:  target = g + decay * e;  e = target - C(target)
Wire:     nothing
Traits:   with decay 1, what was sent plus e equals what was compensated; one float per parameter
Differs:  e is in gradient units, not in units of learning rate times gradient, so that any optimizer can follow; a drop
          of the learning rate therefore rescales an old error too
Spec:     residual
"""

from typing import ClassVar

from torch import Tensor

from gradwire.codecs import Memory
from gradwire.core import register
from gradwire.feedback.feedback import ResidualFeedback
from gradwire.kernels.fused import Accumulation


@register("residual", kind="feedback")
class Residual(ResidualFeedback):
    """Add the error to the next gradient, times ``decay``."""

    decay: float = 1.0
    examples = ("residual", "residual(decay=0.95)")
    memories: ClassVar[dict[str, str]] = {"residual": "mean"}

    def __post_init__(self) -> None:
        if not 0.0 < self.decay <= 1.0:
            raise ValueError(f"residual(decay={self.decay}) must keep a share in (0, 1] of the error")

    @property
    def accumulation(self) -> Accumulation:  # type: ignore[override]
        return Accumulation(decay=self.decay)

    def compensate(self, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        return grad + self.decay * memory["residual"], memory
