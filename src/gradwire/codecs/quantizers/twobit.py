"""Two bits: four values, symmetric about zero, and one scale for every few.

Paper:    Max, "Quantizing for minimum distortion", IRE Trans. Information Theory 1960, Table 1, for four levels
Formula:  C(x)_i = s c_i;  c_i = sign(x_i) * (1 if |x_i| > 0.9816 r else 0.4528 / 1.5104);  r = |x|_2 / sqrt(m)
          s = <x, c> / <c, c>, over the m values of a block
Wire:     scales   float32[blocks], the s
          codes    2 bits each: 1 for x >= 0, 2 for the larger magnitude
          total    4 * blocks + ceil(m / 4) bytes
Traits:   biased; contraction |x - C(x)|^2 = |x|^2 - <x, c>^2 / |c|^2
Differs:  the paper's levels, 0.4528 and 1.5104, are best for normal values of variance 1. Here only their ratio is
          used: the scale is the best one for the block at hand. Zero has a sign, plus; blocks end where segments end
Spec:     twobit, twobit(per=64)
"""

from torch import Tensor

from gradwire.codecs.stage import Quantizer
from gradwire.core import Key, Traits, check_argument, is_count, register
from gradwire.kernels import quantize
from gradwire.kernels.bits import packed_bytes
from gradwire.kernels.groups import blocks_of, num_blocks


@register("twobit", kind="quantizer")
class TwoBit(Quantizer):
    """Four symmetric levels; ``per`` values share a scale."""

    examples = ("twobit", "twobit(per=16)")
    traits = Traits(contraction=True)
    per: int = 4096

    def __post_init__(self) -> None:
        check_argument(self, "per", is_count(self.per), "a positive whole number, as in twobit(per=64)")

    def size(self, lengths: tuple[int, ...]) -> int:
        return 4 * num_blocks(lengths, self.per) + packed_bytes(sum(lengths), 2)

    def encode(self, values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return quantize.twobit_encode(values, blocks_of(lengths, self.per))

    def decode(self, data: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        return quantize.twobit_decode(data, blocks_of(lengths, self.per))
