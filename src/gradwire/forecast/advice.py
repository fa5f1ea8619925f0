"""Advice: which way to synchronize, and whether to compress at all.

Calibrations are wrong by some percent, so the fastest prediction alone is no good reason. A way is taken only if it
would not be much slower than dense training even where the figures err against it: the worst corner of a box around
them. Of those, the fastest; of those about as fast, the one that loses least.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from gradwire.forecast.calibration import DENSE, Calibration
from gradwire.forecast.candidates import CANDIDATES
from gradwire.forecast.cluster import Cluster
from gradwire.forecast.costs import Prediction, predict
from gradwire.links.rates import FASTEST_BITS, SLOWEST_BITS, LinkSpec

ERROR = 0.15  # that calibrations are trusted to
LOSS = 0.02  # how much slower than dense a choice may turn out
TIE = 0.03  # what counts as equally fast

Predict = Callable[[Calibration, str, Cluster], Prediction]


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        ways: Every way's prediction, fastest first.
        dense: The better of float32 and bfloat16 DDP.
        choice: What to take; ``dense`` where compression does not pay, or might not.
    """

    ways: tuple[Prediction, ...]
    dense: Prediction
    choice: Prediction

    @property
    def compresses(self) -> bool:
        return self.choice.spec not in DENSE

    @property
    def speedup(self) -> float:
        """Of the choice over the better dense way."""
        return self.dense.seconds / self.choice.seconds

    @property
    def tempting(self) -> Prediction | None:
        """A way that looks faster than dense, but not surely enough to be taken."""
        fastest = self.ways[0]
        return fastest if not self.compresses and fastest.seconds < self.dense.seconds else None


def advise(
    calibration: Calibration,
    cluster: Cluster,
    specs: Sequence[str] = CANDIDATES,
    predictor: Predict = predict,
    error: float = ERROR,
) -> Advice:
    """Weigh all candidates that were calibrated."""
    plain = [predictor(calibration, spec, cluster) for spec in known(calibration, DENSE)]
    found = [predictor(calibration, spec, cluster) for spec in known(calibration, specs)]
    dense = min(plain, key=_seconds)
    faster = [way for way in found if way.seconds < dense.seconds]
    safe = [way for way in faster if _holds(calibration, way.spec, cluster, predictor, error)]
    return Advice(tuple(sorted((*plain, *found), key=_seconds)), dense, _least_lossy(safe) if safe else dense)


def break_even(calibration: Calibration, cluster: Cluster, spec: str, predictor: Predict = predict) -> float | None:
    """The rate of the link, in bits a second, above which a way is no longer faster than dense; None if it never is."""

    def pays(bits: float) -> bool:
        there = replace(cluster, link=replace(cluster.link, rate_bits=bits))
        dense = min(predictor(calibration, each, there).seconds for each in known(calibration, DENSE))
        return predictor(calibration, spec, there).seconds < dense

    low, high = SLOWEST_BITS, FASTEST_BITS
    if not pays(low):
        return None
    if pays(high):
        return high
    while high / low > 1.01:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if pays(middle) else (low, middle)
    return low


def known(calibration: Calibration, specs: Sequence[str]) -> list[str]:
    """Those that were calibrated."""
    return [spec for spec in specs if spec in calibration.costs]


def _least_lossy(safe: list[Prediction]) -> Prediction:
    """The first, as candidates are ordered, of those that are about as fast as the fastest."""
    fastest = min(way.seconds for way in safe)
    return next(way for way in safe if way.seconds <= fastest * (1 + TIE))


def _holds(calibration: Calibration, spec: str, cluster: Cluster, predictor: Predict, error: float) -> bool:
    """Whether a way is not much slower than dense, wherever within their error the true figures lie."""
    for truth, place in corners(calibration, cluster, error):
        dense = min(predictor(truth, each, place).seconds for each in known(truth, DENSE))
        if predictor(truth, spec, place).seconds > (1 + LOSS) * dense:
            return False
    return True


def corners(calibration: Calibration, cluster: Cluster, error: float) -> Iterator[tuple[Calibration, Cluster]]:
    """The extremes of what may be true, if every figure was measured to within a share of it."""
    ends = (1 / (1 + error), 1 / (1 - error))
    for compute, codec, rate, delay in itertools.product(ends, repeat=4):
        yield calibration.scaled(compute, codec), replace(cluster, link=scaled(cluster.link, rate, delay))


def scaled(link: LinkSpec, rate: float = 1.0, delay: float = 1.0) -> LinkSpec:
    """A link whose rate and delay are others by some factor."""
    bits = None if link.rate_bits is None else min(FASTEST_BITS, max(SLOWEST_BITS, link.rate_bits * rate))
    return replace(link, rate_bits=bits, delay_seconds=link.delay_seconds * delay, jitter_seconds=0.0)


def _seconds(prediction: Prediction) -> float:
    return prediction.seconds
