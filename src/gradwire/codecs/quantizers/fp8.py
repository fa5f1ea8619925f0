"""fp8: eight bits with an exponent, scaled so that the largest value of a block is the largest of the format.

Paper:    Micikevicius et al., "FP8 formats for deep learning", 2022. https://arxiv.org/abs/2209.05433, the format E4M3
Formula:  C(x)_i = s * fp8(x_i / s);  s = max |x| of the block / 448
Wire:     scales   float32[blocks], the s
          codes    8 bits each, E4M3
          total    4 * blocks + m bytes
Traits:   biased; contraction |x_i - C(x)_i| <= |x_i|
Differs:  blocks end where segments end, and rounding is to nearest (ties to even)
Spec:     fp8, fp8(block=1024)
"""

from torch import Tensor

from gradwire.codecs.stage import Quantizer
from gradwire.core import Key, Traits, check_argument, is_count, register
from gradwire.kernels import quantize
from gradwire.kernels.groups import blocks_of, num_blocks


@register("fp8", kind="quantizer")
class FP8(Quantizer):
    """Floats of 8 bits, with one scale per block; sign, four bits of exponent and three of mantissa."""

    examples = ("fp8", "fp8(block=16)")
    traits = Traits(contraction=True)
    block: int = 256

    def __post_init__(self) -> None:
        check_argument(self, "block", is_count(self.block), "a positive whole number, as in fp8(block=256)")

    def size(self, lengths: tuple[int, ...]) -> int:
        return 4 * num_blocks(lengths, self.block) + sum(lengths)

    def encode(self, values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return quantize.fp8_encode(values, blocks_of(lengths, self.block))

    def decode(self, data: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return quantize.fp8_decode(data, blocks_of(lengths, self.block))
