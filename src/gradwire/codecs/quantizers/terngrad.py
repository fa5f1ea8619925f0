"""TernGrad: minus one, zero or one, times the largest magnitude.

Paper:    Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep
          learning", NeurIPS 2017. https://arxiv.org/abs/1705.07878, equations 3 to 5 and 9
Formula:  y = x clamped to +-clip * sigma;  s = max |y|
          C(x)_i = s * sign(y_i) with probability |y_i| / s, else 0
Wire:     scales   float32[segments], the s
          trits    5 to a byte, 1 + sign
          total    4 * segments + ceil(m / 5) bytes
Traits:   unbiased iff clip = 0, which means no clamping; E C(x) = y
Differs:  each worker has its own s; the paper shares the largest so that sums stay integers.
          sigma is taken about zero, not about the mean: of selected values that all have one
          sign, clamping about the mean would leave nearly nothing.
Spec:     terngrad, terngrad(clip=0)
"""

import math

from torch import Tensor

from gradwire.codecs.stage import Quantizer
from gradwire.core import Key, Traits, check_argument, register
from gradwire.kernels import quantize


@register("terngrad", kind="quantizer")
class TernGrad(Quantizer):
    """Stochastic ternary values. A larger ``clip`` is less biased and noisier; 0 clamps nothing."""

    examples = ("terngrad", "terngrad(clip=0)")
    clip: float = 2.5

    def __post_init__(self) -> None:
        wanted = "a finite number of standard deviations, for example 2.5, or 0 for no clamping"
        check_argument(self, "clip", 0 <= self.clip < math.inf, wanted)

    def size(self, lengths: tuple[int, ...]) -> int:
        return 4 * len(lengths) + (sum(lengths) + 4) // 5

    def encode(self, values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return quantize.ternary_encode(values, lengths, names, key.fold("quantize"), float(self.clip))

    def decode(self, data: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return quantize.ternary_decode(data, lengths)

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=self.clip == 0)
