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

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.stage import IndexCoder
from gradwire.core.keys import Key
from gradwire.core.payload import CorruptMessageError, as_bytes, from_bytes
from gradwire.core.registry import register
from gradwire.kernels.philox import words

_FILLER = 0xFFFF


@register("gap16", kind="indices")
@dataclass(frozen=True)
class Gap16(IndexCoder):
    """Run lengths in 16 bits: two bytes a position at any usual density."""

    fixed = False
    examples: ClassVar[tuple[str, ...]] = ("gap16",)

    def size(self, count: int, n: int) -> int:
        return 2 * max(count, 1 + (n - 1) // _FILLER) if count else 0

    def encode(self, indices: Tensor, n: int) -> Tensor:
        del n
        gaps = _gaps(indices)
        ends = (gaps // _FILLER + 1).cumsum(0)
        stream = gaps.new_full((int(ends[-1]) if len(ends) else 0,), _FILLER)
        stream[ends - 1] = gaps % _FILLER
        return as_bytes(stream.to(torch.int16))

    def decode(self, data: Tensor, count: int, n: int) -> tuple[Tensor, int]:
        # What follows the stream belongs to others: look no further than the longest stream.
        longest = min(data.numel() // 2, count + n // _FILLER)
        stream = from_bytes(data[: 2 * longest], torch.int16).long() & 0xFFFF
        named = stream != _FILLER
        seen = named.cumsum(0)
        used = int(torch.searchsorted(seen, count)) + 1 if count else 0
        if used > longest:
            raise CorruptMessageError(
                f"{longest} words of gap16 name fewer than {count} positions; the message was cut short or damaged"
            )
        ahead = torch.where(named, stream + 1, _FILLER)[:used].cumsum(0)
        return ahead[named[:used]] - 1, 2 * used

    def drop_overflow(self, indices: Tensor, n: int, key: Key) -> Tensor:
        """The positions left when just enough were dropped, in random order, to make room.

        Dropping one position saves a word and costs one filler at most, so words never grow; and
        as fillers never exceed (n - 1) div 65535, at least one position stays.
        """
        room = self.size(indices.numel(), n) // 2
        excess = _num_words(indices) - room
        if excess <= 0:
            return indices
        drawn = words(key.fold("gap16"), "fit", indices.numel(), indices.device)
        order = drawn.argsort(stable=True)
        dropped, left = 0, indices
        while excess > 0:
            dropped += excess
            left = indices[order[dropped:].sort().values]
            excess = _num_words(left) - room
        return left


def _gaps(indices: Tensor) -> Tensor:
    """How many positions are passed over before each one."""
    return torch.diff(indices, prepend=indices.new_full((1,), -1)) - 1


def _num_words(indices: Tensor) -> int:
    return int((_gaps(indices) // _FILLER + 1).sum())
