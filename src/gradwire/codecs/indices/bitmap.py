"""Bitmap: one bit for each element, set where a value is sent.

Paper:    none; the plain answer for dense supports, best when about half of all is sent.
Formula:  bit_i = 1 if i is sent, else 0
Wire:     bits   bit i is bit i mod 8 of byte i div 8; zeros fill the last byte
          total  ceil(n / 8) bytes, however many positions are sent
Traits:   exact; fixed length.
Differs:  no paper to differ from.
Spec:     bitmap
"""

from torch import Tensor

from gradwire.codecs.stage import IndexCoder
from gradwire.core import CorruptMessageError, register
from gradwire.core.payload import first_bytes
from gradwire.kernels.rice import find_bits, set_bits


@register("bitmap", kind="indices")
class Bitmap(IndexCoder):
    """A set as a row of bits: smaller than int32 when more than one in 32 is sent."""

    examples = ("bitmap",)

    def size(self, count: int, n: int) -> int:
        return (n + 7) // 8

    def encode(self, indices: Tensor, n: int) -> Tensor:
        return set_bits(indices, n)

    def decode(self, data: Tensor, count: int, n: int) -> tuple[Tensor, int]:
        size = self.size(count, n)
        indices = find_bits(first_bytes(data, size, f"a bitmap of {n} elements"))
        if indices.numel() != count:
            raise CorruptMessageError(
                f"the bitmap names {indices.numel()} positions where {count} were promised; the message was damaged"
            )
        return indices, size
