"""Natural compression: stochastic rounding to a power of two.

Paper:    Horvath et al., "Natural compression for distributed deep learning", MSML 2022.
          https://arxiv.org/abs/1905.10988, Definition 1
Formula:  for 2^a <= |x_i| <= 2^(a+1): C(x)_i = sign(x_i) * 2^(a+1) with probability
          |x_i| / 2^a - 1, else sign(x_i) * 2^a
Wire:     codes    9 bits each: the sign, then the 8 exponent bits of a float32
          total    ceil(9m / 8) bytes
Traits:   unbiased; contraction E|x - C(x)|^2 <= |x|^2 / 8
Differs:  both promises need room on both sides. Below 2^-126 a value is rounded to 0 or 2^-126,
          which is unbiased but no contraction; above 2^127 to 2^127, a contraction but biased.
Spec:     natural
"""

from torch import Tensor

from gradwire.codecs.stage import Quantizer
from gradwire.core import Key, Traits, register
from gradwire.kernels import quantize
from gradwire.kernels.bits import packed_bytes


@register("natural", kind="quantizer")
class Natural(Quantizer):
    """Keep sign and exponent; the mantissa is the chance that the exponent goes up by one."""

    examples = ("natural",)
    traits = Traits(unbiased=True, contraction=True)

    def size(self, lengths: tuple[int, ...]) -> int:
        return packed_bytes(sum(lengths), quantize.NATURAL_BITS)

    def encode(self, values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return quantize.natural_encode(values, lengths, names, key.fold("quantize"))

    def decode(self, data: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        # With more than 8 bits to a value, the bytes tell how many there are, and no device has to be asked.
        return quantize.natural_decode(data, 8 * data.numel() // quantize.NATURAL_BITS)
