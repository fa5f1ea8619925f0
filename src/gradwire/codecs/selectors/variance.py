"""Variance-based: send a coordinate once its sum stands out of its noise.

Paper:    Tsuzuku, Imachi and Akiba, "Variance-based gradient compression for efficient distributed
          deep learning", ICLR workshop 2018. https://arxiv.org/abs/1802.06058
Formula:  r = residual + gradient;  v += sum_z (g_z / B)^2 over the samples z of the batch of B;
          C(r)_i = r_i if r_i^2 > alpha * v_i, else 0;
          then v_i = 0 where sent, v_i *= decay elsewhere
Wire:     count    of the entries sent, since it is not known beforehand
          indices  as the index coder packs them
          values   as the quantizer packs them
Traits:   none, for it may send nothing; not fixed
Differs:  as in the paper where the loop passes per-sample moments to `wire.observe`. Else M
          micro-batches stand for the samples, v += sum_m (g_m / M)^2, if the loop passes those;
          and if it passes nothing, the rank's batch does, v += gradient^2, which overstates the
          noise most. The values are the quantizer's affair, where the paper sends 4-bit powers
          of two. A segment sends at most the share ``most``, its largest entries.
Spec:     variance, variance(alpha=2.0)
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.stage import EncodeInput, Memory, Selector
from gradwire.core.arguments import is_fraction, is_number
from gradwire.core.keys import Key
from gradwire.core.registry import register
from gradwire.core.traits import Traits
from gradwire.kernels.select import share, trim

_MOMENT = "second_moment"


@register("variance", kind="selector")
@dataclass(frozen=True)
class Variance(Selector):
    """The coordinates whose gradients agree over time.

    Attributes:
        alpha: How far the squared sum must stand above the summed squares; the paper takes 1 to 2.
        decay: What unsent coordinates keep of their second moment each step, in (0, 1].
        most: The share of a segment's entries that may be sent, in (0, 1].
    """

    alpha: float = 1.0
    decay: float = 0.999
    most: float = 1.0

    fixed = False
    memories = (_MOMENT,)
    examples: ClassVar[tuple[str, ...]] = ("variance", "variance(alpha=2.0, most=0.5)")

    def __post_init__(self) -> None:
        if not (is_number(self.alpha) and self.alpha > 0):
            raise ValueError(
                f"variance got alpha={self.alpha!r}, which must be a number above 0; write alpha=1.0 to 2.0"
            )
        for name, value in (("decay", self.decay), ("most", self.most)):
            if not is_fraction(value):
                raise ValueError(
                    f"variance got {name}={value!r}, which must be in (0, 1]; write variance(decay=0.999, most=0.1)"
                )

    def capacity(self, n: int) -> int:
        return share(self.most, n)

    def absorb(self, grad: Tensor, memory: Memory, observed: Tensor | None = None) -> Memory:
        """The memory with the observed moments added, or, for loops that observe no samples, the gradient's square."""
        if observed is not None:
            return {**memory, _MOMENT: memory[_MOMENT] + observed}
        limit = torch.finfo(grad.dtype).max  # an infinite moment would never decay
        moment = (memory[_MOMENT] + grad.square()).clamp(max=limit)
        return {**memory, _MOMENT: moment}

    def select(self, signal: EncodeInput, key: Key) -> Tensor:
        r, v = signal.target, signal.memory[_MOMENT]
        most = tuple(self.capacity(n) for n in signal.segments.lengths)
        return trim(r.square() > self.alpha * v, r.abs(), signal.segments, most, key)

    def remember(self, signal: EncodeInput, indices: Tensor) -> Memory:
        moment = (self.decay * signal.memory[_MOMENT]).index_fill(0, indices, 0.0)
        return {**signal.memory, _MOMENT: moment}

    @property
    def traits(self) -> Traits:
        return Traits(fixed=False)
