"""Threshold: keep the entries that are large enough, however many they are.

Paper:    threshold: Strom, "Scalable distributed DNN training using commodity GPU cloud
          computing", Interspeech 2015. adaptive_threshold: Dutta et al., "On the discrepancy
          between the theoretical analysis and practical implementations of compressed
          communication for distributed deep learning", AAAI 2020.
          https://arxiv.org/abs/1911.08250
Formula:  threshold: C(x)_i = x_i if |x_i| >= v, else 0
          adaptive_threshold: C(x)_i = x_i if 2 |x_i| >= max_j |x_j| of its segment, else 0
Wire:     count    of the entries sent, since it is not known beforehand
          indices  as the index coder packs them
          values   as the quantizer packs them
Traits:   threshold: none, for it may send nothing; adaptive_threshold: contraction; not fixed
Differs:  Strom sends +v or -v and keeps the rest; here the quantizer says what is sent. A segment
          sends at most the share ``most``, its largest entries, ties drawn at random.
Spec:     threshold(0.001), adaptive_threshold
"""

from torch import Tensor

from gradwire.codecs.selectors.passing import PassingSelector
from gradwire.codecs.stage import EncodeInput
from gradwire.core import Traits, check_argument, check_fraction, is_number, register
from gradwire.kernels.groups import largest, spread


@register("threshold", kind="selector")
class Threshold(PassingSelector):
    """The entries of magnitude at least ``v``.

    Attributes:
        v: The smallest magnitude that is sent.
        most: The share of a segment's entries that may be sent, in (0, 1].
    """

    v: float
    most: float = 1.0
    examples = ("threshold(0.5)", "threshold(0.001, most=0.1)")

    def __post_init__(self) -> None:
        check_argument(self, "v", is_number(self.v) and self.v >= 0, "a magnitude from 0, for example 0.001")
        check_fraction(self, "most", "0.1")

    def passes(self, signal: EncodeInput) -> Tensor:
        return signal.target.abs() >= self.v


@register("adaptive_threshold", kind="selector")
class AdaptiveThreshold(PassingSelector):
    """Entries of at least half the maximum, in each segment.

    Attributes:
        most: The share of a segment's entries that may be sent, in (0, 1].
    """

    most: float = 1.0
    traits = Traits(contraction=True, fixed=False)
    examples = ("adaptive_threshold", "adaptive_threshold(most=0.1)")

    def __post_init__(self) -> None:
        check_fraction(self, "most", "0.1")

    def passes(self, signal: EncodeInput) -> Tensor:
        size, lengths = signal.target.abs(), signal.segments.lengths_on(signal.target.device)
        peak = spread(largest(size, lengths), lengths)
        return (2 * size >= peak) & (peak > 0)
