"""AdaComp: in every bin, the entries that today's gradient would lift to the bin's maximum.

Paper:    Chen et al., "AdaComp: adaptive residual gradient compression for data-parallel
          distributed training", AAAI 2018. https://arxiv.org/abs/1712.02679
Formula:  G = residual + gradient;  H = G + (scale - 1) * gradient;
          C(G)_i = G_i if |H_i| >= max_{j in bin of i} |G_j| > 0, else 0
Wire:     count    of the entries sent, since it is not known beforehand
          indices  as the index coder packs them
          values   as the quantizer packs them
Traits:   none: a bin may send nothing when its gradient opposes its residual; not fixed
Differs:  the choice is as in the paper; the values are the quantizer's affair, where the paper
          sends signs with one scale per layer, and indices travel as flat positions, not within
          bins. A segment sends at most the share ``most``, its largest entries.
Spec:     adacomp, adacomp(50), adacomp(scale=3.0)
"""

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.stage import EncodeInput, Selector
from gradwire.core.arguments import is_count, is_fraction, is_number
from gradwire.core.keys import Key
from gradwire.core.registry import register
from gradwire.core.traits import Traits
from gradwire.kernels.groups import blocks, largest, spread
from gradwire.kernels.select import share, trim


@register("adacomp", kind="selector")
@dataclass(frozen=True)
class AdaComp(Selector):
    """A soft threshold per bin, so that lively bins send more.

    Attributes:
        bin: Consecutive entries that share a maximum; the paper takes 50 for convolutions and 500
            for fully connected and recurrent layers.
        scale: How often today's gradient counts in H, at least 1; the paper takes 2.
        most: The share of a segment's entries that may be sent, in (0, 1].
    """

    bin: int = 500
    scale: float = 2.0
    most: float = 1.0

    fixed = False
    examples: ClassVar[tuple[str, ...]] = ("adacomp", "adacomp(bin=50)", "adacomp(bin=8, most=0.2)")

    def __post_init__(self) -> None:
        if not is_count(self.bin):
            raise ValueError(
                f"adacomp got bin={self.bin!r}, which must be a whole number of entries from 1; write bin=500"
            )
        if not (is_number(self.scale) and self.scale >= 1):
            raise ValueError(f"adacomp got scale={self.scale!r}, which must be a number from 1; write scale=2.0")
        if not is_fraction(self.most):
            raise ValueError(
                f"adacomp got most={self.most!r}, the share of the entries that may be sent, "
                "which must be in (0, 1]; write most=0.1 for a tenth"
            )

    def capacity(self, n: int) -> int:
        return share(self.most, n)

    def select(self, signal: EncodeInput, key: Key) -> Tensor:
        size, table = signal.target.abs(), signal.segments
        ahead = signal.target + (self.scale - 1) * signal.grad  # H
        bins = blocks(table.lengths_on(size.device), self.bin)
        peak = spread(largest(size, bins), bins)
        most = tuple(self.capacity(n) for n in table.lengths)
        return trim((ahead.abs() >= peak) & (peak > 0), size, table, most, key)

    @property
    def traits(self) -> Traits:
        return Traits(fixed=False)
