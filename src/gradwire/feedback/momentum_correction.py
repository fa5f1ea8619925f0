"""Momentum correction: Deep Gradient Compression's memory, momentum before compression.

Paper:    Lin et al., "Deep gradient compression: reducing the communication bandwidth for distributed training",
          ICLR 2018. https://arxiv.org/abs/1712.01887, Algorithm 4
Formula:  g = clip(g, thr / sqrt(N))                               local gradient clipping
          u = m u + g;        target = v + u                        momentum correction
          u = m (u + g);      target = v + u + g                    the same with nesterov=True
          v = target - sent;  u = 0 where a selector chose          momentum factor masking
Wire:     nothing
Traits:   what was sent plus v equals what was compensated; two floats per parameter
Differs:  whatever a quantizer rounded away stays in v; where nothing was selected (a dense lane, or a dense warm-up)
          u is kept, since masking it would remove momentum altogether; the clipped norm is that of the rank's whole
          gradient; the optimizer behind must have no momentum of its own
Spec:     momentum_correction(0.9)

The whole method, with its selection and its warm-up, is the preset `dgc` in `engine/presets.py`. Masking is in
`feedback.py`, or part of the one pass of `kernels/fused.py`, where that serves.
"""

from typing import ClassVar

from torch import Tensor

from gradwire.codecs import Memory
from gradwire.core import register
from gradwire.feedback.feedback import MaskingFeedback
from gradwire.kernels.fused import Accumulation


@register("momentum_correction", kind="feedback")
class MomentumCorrection(MaskingFeedback):
    """Accumulate velocity, not gradient, in the residual.

    Attributes:
        momentum: m above.
        nesterov: The second form.
        masking: Momentum factor masking.
        clip: thr above; None does not clip.
    """

    momentum: float = 0.9
    nesterov: bool = False
    masking: bool = True
    clip: float | None = None
    examples = (
        "momentum_correction",
        "momentum_correction(momentum=0.8, nesterov=True)",
        "momentum_correction(masking=False)",
    )
    memories: ClassVar[dict[str, str]] = {"momentum": "mean", "residual": "mean"}

    def __post_init__(self) -> None:
        if not 0.0 <= self.momentum < 1.0:
            raise ValueError(f"{self}: momentum must be in [0, 1)")
        if self.clip is not None and not self.clip > 0.0:
            raise ValueError(f"{self}: clip must be a positive norm, or None for no clipping")

    @property
    def accumulation(self) -> Accumulation:  # type: ignore[override]
        return Accumulation(self.momentum, self.nesterov)

    def compensate(self, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        u, v = memory["momentum"], memory["residual"]
        if self.nesterov:
            u = self.momentum * (u + grad)
            target = v + u + grad
        else:
            u = self.momentum * u + grad
            target = v + u
        return target, {**memory, "momentum": u}
