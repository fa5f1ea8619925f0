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

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradwire.codecs.stage import Quantizer
from gradwire.core.keys import Key
from gradwire.core.payload import as_bytes, from_bytes
from gradwire.core.registry import register
from gradwire.core.traits import Traits
from gradwire.kernels.bits import pack, packed_bytes, unpack
from gradwire.kernels.groups import spread, total


@register("onebit", kind="quantizer")
@dataclass(frozen=True)
class OneBit(Quantizer):
    """Each value is heard as the mean of those on its side of zero."""

    examples: ClassVar[tuple[str, ...]] = ("onebit",)

    def size(self, lengths: tuple[int, ...]) -> int:
        return 8 * len(lengths) + packed_bytes(sum(lengths), 1)

    def encode(self, values: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        del names, key
        above = values >= 0
        upper, lower = (_mean_where(side, values, lengths) for side in (above, ~above))
        return torch.cat((as_bytes(upper), as_bytes(lower), pack(above, 1)))

    def decode(self, data: Tensor, lengths: Tensor, names: tuple[str, ...], key: Key) -> Tensor:
        del names, key
        head = 8 * lengths.numel()
        upper, lower = from_bytes(data[:head], torch.float32).view(2, -1)
        above = unpack(data[head:], 1, int(lengths.sum())) == 1
        return torch.where(above, spread(upper, lengths), spread(lower, lengths))

    @property
    def traits(self) -> Traits:
        return Traits(contraction=True)


def _mean_where(mask: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
    counts = total(mask, lengths).clamp(min=1)
    return (total(torch.where(mask, values, 0.0), lengths) / counts).float()
