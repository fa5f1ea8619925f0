"""OneBit: one bit per value, and one mean for each of the two bits.

Paper:    Seide et al., "1-bit stochastic gradient descent and its application to data-parallel
          distributed training of speech DNNs", Interspeech 2014
Formula:  C(x)_i = mean of the values >= 0 if x_i >= 0, else mean of the values < 0
Wire:     upper    float32[segments], the means of the values >= 0
          lower    float32[segments], the means of the values < 0
          signs    1 bit each, 1 for x >= 0
          total    8 * segments + ceil(m / 8) bytes
Traits:   biased; contraction |x - C(x)|^2 = |x|^2 - p * upper^2 - q * lower^2, of p and q values
Differs:  the two means are per segment, not per column of a weight matrix.
Spec:     onebit
"""

from torch import Tensor

from gradwire.codecs.stage import Quantizer
from gradwire.core import Key, Traits, register
from gradwire.kernels import quantize
from gradwire.kernels.bits import packed_bytes


@register("onebit", kind="quantizer")
class OneBit(Quantizer):
    """One bit: each side of zero is decoded as its mean."""

    examples = ("onebit",)
    traits = Traits(contraction=True)

    def size(self, lengths: tuple[int, ...]) -> int:
        return 8 * len(lengths) + packed_bytes(sum(lengths), 1)

    def encode(self, values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return quantize.onebit_encode(values, lengths)

    def decode(self, data: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return quantize.onebit_decode(data, lengths)
