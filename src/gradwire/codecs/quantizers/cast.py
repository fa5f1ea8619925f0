"""Casts: send each value in a float format, 32 or 16 bits wide.

Paper:    Micikevicius et al., "Mixed precision training", ICLR 2018.
          https://arxiv.org/abs/1710.03740
Formula:  C(x)_i = the nearest number of the format to x_i, clamped to +-max of the format
Wire:     values   float32, float16 or bfloat16[m], little-endian
          total    4m bytes (fp32) or 2m bytes (fp16, bf16)
Traits:   linear; contraction |x_i - C(x)_i| <= |x_i|; fp32 is also lossless and unbiased
Differs:  finite values beyond the format's range saturate instead of turning into infinity;
          infinities and NaN pass through, so that a broken gradient is still seen as broken.
Spec:     fp32, fp16, bf16
"""

from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.stage import Quantizer
from gradwire.core import Key, Traits, as_bytes, from_bytes, register
from gradwire.kernels.quantize import cast_decode, cast_encode


class Cast(Quantizer):
    """A payload that *is* the values in ``dtype``, so payloads may be added as they stand."""

    dtype: ClassVar[torch.dtype]
    traits = Traits(linear=True, contraction=True)

    def size(self, lengths: tuple[int, ...]) -> int:
        return sum(lengths) * self.dtype.itemsize

    def encode(self, values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        # A payload never shares memory with what it was made of.
        return as_bytes(values.clone() if values.dtype == self.dtype else cast_encode(values, self.dtype))

    def decode(self, data: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        values = from_bytes(data, self.dtype)
        return values if self.dtype == torch.float32 else cast_decode(values)


@register("fp32", kind="quantizer")
class FP32(Cast):
    """Values as they are."""

    examples = ("fp32",)
    dtype = torch.float32
    traits = Traits(linear=True, unbiased=True, contraction=True, lossless=True)


@register("fp16", kind="quantizer")
class FP16(Cast):
    """Half precision: 11 significant bits, at most 65504."""

    examples = ("fp16",)
    dtype = torch.float16


@register("bf16", kind="quantizer")
class BF16(Cast):
    """The upper half of a float32: 8 significant bits, the same range."""

    examples = ("bf16",)
    dtype = torch.bfloat16
