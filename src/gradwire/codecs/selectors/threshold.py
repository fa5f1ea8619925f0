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

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.stage import EncodeInput, Selector
from gradwire.core.arguments import is_fraction, is_number
from gradwire.core.keys import Key
from gradwire.core.registry import register
from gradwire.core.traits import Traits
from gradwire.kernels.groups import largest, spread
from gradwire.kernels.select import share, trim


@register("threshold", kind="selector")
@dataclass(frozen=True)
class Threshold(Selector):
    """The entries of magnitude at least ``v``.

    Attributes:
        v: The smallest magnitude that is sent.
        most: The share of a segment's entries that may be sent, in (0, 1].
    """

    v: float
    most: float = 1.0

    fixed = False
    examples: ClassVar[tuple[str, ...]] = ("threshold(0.5)", "threshold(0.001, most=0.1)")

    def __post_init__(self) -> None:
        if not (is_number(self.v) and self.v >= 0):
            raise ValueError(
                f"threshold({self.v!r}) keeps entries by magnitude, which must be a number from 0; "
                "write threshold(0.001)"
            )
        _check_most("threshold", self.most)

    def capacity(self, n: int) -> int:
        return share(self.most, n)

    def select(self, signal: EncodeInput, key: Key) -> Tensor:
        size, table = signal.target.abs(), signal.segments
        most = tuple(self.capacity(n) for n in table.lengths)
        return trim(size >= self.v, size, table, most, key)

    @property
    def traits(self) -> Traits:
        return Traits(fixed=False)


@register("adaptive_threshold", kind="selector")
@dataclass(frozen=True)
class AdaptiveThreshold(Selector):
    """The entries of at least half the largest magnitude of their segment.

    Attributes:
        most: The share of a segment's entries that may be sent, in (0, 1].
    """

    most: float = 1.0

    fixed = False
    examples: ClassVar[tuple[str, ...]] = ("adaptive_threshold", "adaptive_threshold(most=0.1)")

    def __post_init__(self) -> None:
        _check_most("adaptive_threshold", self.most)

    def capacity(self, n: int) -> int:
        return share(self.most, n)

    def select(self, signal: EncodeInput, key: Key) -> Tensor:
        size, table = signal.target.abs(), signal.segments
        lengths = table.lengths_on(size.device)
        peak = spread(largest(size, lengths), lengths)
        most = tuple(self.capacity(n) for n in table.lengths)
        return trim((2 * size >= peak) & (peak > 0), size, table, most, key)

    @property
    def traits(self) -> Traits:
        return Traits(contraction=True, fixed=False)


def _check_most(name: str, most: float) -> None:
    if not is_fraction(most):
        raise ValueError(
            f"{name} got most={most!r}, the share of the entries that may be sent, which must be "
            "in (0, 1]; write most=0.1 for a tenth"
        )
