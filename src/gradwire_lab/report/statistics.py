"""Means over seeds, and how far they can be trusted."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from scipy.special import stdtrit

ALIKE = 1e-9  # numbers that differ by less do so by rounding


@dataclass(frozen=True)
class Estimate:
    """A mean of n values, their sample standard deviation, and the 95 % t-interval of the mean.

    Of one value nothing is known but itself: the spread and the ends of the interval are then None. Values that are all
    equal show nothing of how far others would lie apart: there is no interval then.
    """

    n: int
    mean: float
    spread: float | None = None
    low: float | None = None
    high: float | None = None

    @property
    def half_width(self) -> float | None:
        return None if self.high is None else self.high - self.mean

    def within(self, least: float, most: float) -> "Estimate":
        """The same, with an interval that ends where what is possible does."""
        if self.low is None or self.high is None:
            return self
        return replace(self, low=max(self.low, least), high=min(self.high, most))


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of some values, taken as independent draws.

    Raises:
        ValueError: There are none.
    """
    n = len(values)
    if n == 0:
        raise ValueError("there is no mean of no values")
    mean = math.fsum(values) / n
    if n == 1:
        return Estimate(1, mean)
    if max(values) - min(values) < ALIKE:
        return Estimate(n, mean, 0.0)
    spread = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (n - 1))
    reach = float(stdtrit(n - 1, 0.975)) * spread / math.sqrt(n)
    return Estimate(n, mean, spread, mean - reach, mean + reach)


def paired(values: Mapping[int, float], baseline: Mapping[int, float]) -> Estimate | None:
    """The mean difference to a baseline over the seeds that both ran; None if they share none."""
    seeds = sorted(values.keys() & baseline.keys())
    return estimate([values[seed] - baseline[seed] for seed in seeds]) if seeds else None
