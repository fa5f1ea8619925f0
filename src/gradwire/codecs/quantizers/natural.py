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

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.stage import Quantizer
from gradwire.core.keys import Key
from gradwire.core.registry import register
from gradwire.core.traits import Traits
from gradwire.kernels.bits import pack, packed_bytes, unpack
from gradwire.kernels.philox import uniform

_BITS = 9
_LARGEST = 254  # exponent bits of 2^127; 255 means infinity


@register("natural", kind="quantizer")
@dataclass(frozen=True)
class Natural(Quantizer):
    """Keep sign and exponent; the mantissa is the chance that the exponent goes up by one."""

    examples: ClassVar[tuple[str, ...]] = ("natural",)

    def size(self, lengths: tuple[int, ...]) -> int:
        return packed_bytes(sum(lengths), _BITS)

    def encode(self, values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        raw = values.view(torch.int32)
        exponent = raw >> 23 & 0xFF
        # Subnormals are mantissa * 2^-126 with exponent bits 0: the same rule suits them.
        mantissa = (raw & 0x7FFFFF) * 2.0**-23
        up = uniform(key.fold("quantize"), names, lengths) < mantissa
        # No finite value becomes infinite, yet an infinite one stays so.
        rounded = torch.maximum(exponent, (exponent + up).clamp(max=_LARGEST))
        return pack(rounded + ((raw < 0).int() << 8), _BITS)

    def decode(self, data: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        del names, key
        codes = unpack(data, _BITS, int(lengths.sum()))
        power = ((codes & 0xFF) << 23).view(torch.float32)
        return torch.where(codes > 0xFF, -power, power)

    @property
    def traits(self) -> Traits:
        return Traits(unbiased=True, contraction=True)
