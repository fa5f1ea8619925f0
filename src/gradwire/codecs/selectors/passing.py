"""Selectors by a test: entries that pass it are sent, however many they are, but at most a share of a segment."""

from abc import abstractmethod

from torch import Tensor

from gradwire.codecs.stage import EncodeInput, Selector
from gradwire.core import Key, Traits
from gradwire.kernels.select import share, trim


class PassingSelector(Selector):
    """Entries that pass a test. Of a segment with too many of them the largest are sent, ties drawn at random.

    Attributes:
        most: The share of a segment's entries that may be sent, in (0, 1].
    """

    most: float
    traits = Traits(fixed=False)

    @abstractmethod
    def passes(self, signal: EncodeInput) -> Tensor:
        """By entry: whether it passes the test."""

    def capacity(self, n: int) -> int:
        return share(self.most, n)

    def select(self, signal: EncodeInput, key: Key) -> Tensor:
        most = tuple(map(self.capacity, signal.segments.lengths))
        return trim(self.passes(signal), signal.target.abs(), signal.segments, most, key)
