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

import torch
from torch import Tensor

from gradwire.codecs.selectors.passing import PassingSelector
from gradwire.codecs.stage import EncodeInput, Memory
from gradwire.core import check_argument, check_fraction, is_number, register

_MOMENT = "second_moment"


@register("variance", kind="selector")
class Variance(PassingSelector):
    """Coordinates whose gradients agree over time.

    Attributes:
        alpha: How far the squared sum must stand above the summed squares; the paper takes 1 to 2.
        decay: What unsent coordinates keep of their second moment each step, in (0, 1].
        most: The share of a segment's entries that may be sent, in (0, 1].
    """

    alpha: float = 1.0
    decay: float = 0.999
    most: float = 1.0
    memories = (_MOMENT,)
    examples = ("variance", "variance(alpha=2.0, most=0.5)")

    def __post_init__(self) -> None:
        check_argument(self, "alpha", is_number(self.alpha) and self.alpha > 0, "a number above 0, such as 1.0 or 2.0")
        check_fraction(self, "decay", "0.999")
        check_fraction(self, "most", "0.1")

    def memory_with_gradient(self, grad: Tensor, memory: Memory, observed: Tensor | None = None) -> Memory:
        """The memory with the observed moments added, or, for loops that observe no samples, the gradient's square."""
        if observed is not None:
            return {**memory, _MOMENT: memory[_MOMENT] + observed}
        limit = torch.finfo(grad.dtype).max  # an infinite moment would never decay
        moment = (memory[_MOMENT] + grad.square()).clamp(max=limit)
        return {**memory, _MOMENT: moment}

    def passes(self, signal: EncodeInput) -> Tensor:
        return signal.target.square() > self.alpha * signal.memory[_MOMENT]

    def memory_after_sending(self, signal: EncodeInput, indices: Tensor) -> Memory:
        moment = (self.decay * signal.memory[_MOMENT]).index_fill(0, indices, 0.0)
        return {**signal.memory, _MOMENT: moment}
