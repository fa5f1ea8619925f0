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

from torch import Tensor

from gradwire.codecs.selectors.passing import PassingSelector
from gradwire.codecs.stage import EncodeInput
from gradwire.core import check_argument, check_fraction, is_count, is_number, register
from gradwire.kernels.groups import blocks, largest, spread


@register("adacomp", kind="selector")
class AdaComp(PassingSelector):
    """A threshold for each bin, which the newest gradient may reach; bins that change most send most.

    Attributes:
        bin: Consecutive entries that share a maximum; the paper takes 50 for convolutions and 500
            for fully connected and recurrent layers.
        scale: How often today's gradient counts in H, at least 1; the paper takes 2.
        most: The share of a segment's entries that may be sent, in (0, 1].
    """

    bin: int = 500
    scale: float = 2.0
    most: float = 1.0
    examples = ("adacomp", "adacomp(bin=50)", "adacomp(bin=8, most=0.2)")

    def __post_init__(self) -> None:
        check_argument(self, "bin", is_count(self.bin), "a whole number of entries from 1, for example 500")
        check_argument(self, "scale", is_number(self.scale) and self.scale >= 1, "a number from 1, for example 2.0")
        check_fraction(self, "most", "0.1")

    def passes(self, signal: EncodeInput) -> Tensor:
        ahead = signal.target + (self.scale - 1) * signal.grad  # H
        bins = blocks(signal.segments.lengths_on(ahead.device), self.bin)
        peak = spread(largest(signal.target.abs(), bins), bins)
        return (ahead.abs() >= peak) & (peak > 0)
