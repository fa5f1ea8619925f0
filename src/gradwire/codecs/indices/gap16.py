"""Gap16: each position as its 16-bit distance from the one before.

Paper:    Lin, Han, Mao, Wang and Dally, "Deep gradient compression", ICLR 2018.
          https://arxiv.org/abs/1712.01887, Algorithm 1: 16-bit run lengths of zeros
Formula:  g_1 = i_1,  g_j = i_j - i_(j-1) - 1;  g is sent as g div 65535 fillers and g mod 65535
Wire:     words  16-bit little-endian; 0xFFFF is a filler: advance 65535 and name no position
          total  2k bytes, and 2 more for each filler, of which there are (n-1) div 65535 at most;
                 never more than 2 max(k, 1 + (n-1) div 65535)
Traits:   exact, unless fillers overflow the budget: then a few positions, drawn at random, are
          not sent; length varies where there are fillers.
Differs:  the paper does not say what becomes of runs beyond 16 bits; here they take fillers.
Spec:     gap16
"""

from torch import Tensor

from gradwire.codecs.stage import IndexCoder
from gradwire.core import Key, register
from gradwire.kernels.gap16 import FILLER, drop_to_fit, gap16_decode, gap16_encode


@register("gap16", kind="indices")
class Gap16(IndexCoder):
    """Run lengths in 16 bits: two bytes a position at any usual density."""

    fixed = False
    examples = ("gap16",)

    def size(self, count: int, n: int) -> int:
        return 2 * max(count, 1 + (n - 1) // FILLER) if count else 0

    def encode(self, indices: Tensor, n: int) -> Tensor:
        return gap16_encode(indices)

    def decode(self, data: Tensor, count: int, n: int) -> tuple[Tensor, int]:
        return gap16_decode(data, count, n)

    def drop_overflow(self, indices: Tensor, n: int, key: Key) -> Tensor:
        return drop_to_fit(indices, self.size(indices.numel(), n) // 2, key.fold("gap16"))
