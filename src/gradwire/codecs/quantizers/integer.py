"""Integers: round each block to a few evenly spaced steps of its largest magnitude.

Paper:    Wang et al., "ZeRO++: extremely efficient collective communication for giant model
          training", ICLR 2024. https://arxiv.org/abs/2306.10209, section 3.3
Formula:  C(x)_i = s * q_i / L;  q_i = round(L * x_i / s);  s = max |x| of the block;
          L = 2^(b-1) - 1 for b = 8, 4 or 2 bits
Wire:     scales   float32[blocks], the s
          codes    b bits each, q + L
          total    4 * blocks + ceil(m * b / 8) bytes
Traits:   biased; contraction |x_i - C(x)_i| <= |x_i|, and the largest value is exact
Differs:  blocks end where segments end, rounding is to nearest (ties to even), and the largest
          magnitude travels instead of the step, which could underflow.
Spec:     int8, int4, int2, int8(block=1024)
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.stage import FeedbackKernel, Quantizer
from gradwire.core import Key, Traits, check_argument, is_count, register
from gradwire.core.layout import Flat
from gradwire.kernels import fused, quantize
from gradwire.kernels.bits import packed_bytes
from gradwire.kernels.groups import num_blocks


@dataclass(frozen=True)
class AbsMax(Quantizer):
    """Signed integers of ``bits`` bits, one scale per block. A smaller block is more exact."""

    bits: ClassVar[int]
    traits = Traits(contraction=True)
    block: int

    def __post_init__(self) -> None:
        check_argument(self, "block", is_count(self.block), "a whole number of values from 1, for example 256")

    @property
    def feedback_kernel(self) -> FeedbackKernel:  # type: ignore[override]
        return partial(fused.feedback_integer_, bits=self.bits, block=self.block)

    def size(self, lengths: tuple[int, ...]) -> int:
        return 4 * num_blocks(lengths, self.block) + packed_bytes(sum(lengths), self.bits)

    def encode(self, values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return quantize.integer_encode(values, lengths, self.bits, self.block)

    def decode(self, data: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return quantize.integer_decode(data, lengths, self.bits, self.block)

    def decode_into(self, data: Tensor, lengths: Tensor, out: Flat) -> Tensor:
        return quantize.integer_decode(data, lengths, self.bits, self.block, out)

    def merge(self, messages: Tensor, error: Tensor | None, lengths: tuple[int, ...]) -> tuple[Tensor, Tensor | None]:
        return fused.merge_integer(messages, error, lengths, self.bits, self.block)


@register("int8", kind="quantizer")
class Int8(AbsMax):
    """255 steps from -s to s."""

    examples = ("int8", "int8(block=1024)")
    bits = 8
    takes_scattered = True
    block: int = 256


@register("int4", kind="quantizer")
class Int4(AbsMax):
    """15 steps from -s to s."""

    examples = ("int4",)
    bits = 4
    takes_scattered = True
    block: int = 128


@register("int2", kind="quantizer")
class Int2(AbsMax):
    """Three steps: -s, 0 and s."""

    examples = ("int2",)
    bits = 2
    takes_scattered = True
    block: int = 64
