"""Advice: which way to synchronize, and whether to compress at all.

Calibrations are wrong by some percent, so the fastest prediction alone is no good reason. A way is taken only if it
would not be much slower than dense training even where the figures err against it: the worst corner of a box around
them. Of those, the fastest; of those about as fast, the one that loses least, which is dense training if it is among
them. `break_even` says at which rates of the link a way is faster than dense training.
"""

import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from operator import attrgetter
from typing import NamedTuple

from gradwire.comm.rates import FASTEST_BITS, SLOWEST_BITS, LinkSpec
from gradwire_lab.perf_model.accuracy_records import MAX_LOSS
from gradwire_lab.perf_model.calibration import Calibration
from gradwire_lab.perf_model.candidates import CANDIDATES
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import Prediction, predict
from gradwire_lab.perf_model.model import DENSE

ERROR = 0.15  # that calibrations are trusted to
LOSS = 0.02  # how much slower than dense a choice may turn out
TIE = 0.03  # what counts as equally fast
ENOUGH = 0.98  # of the dense step: what a way must be below to be tried, and on trial to be kept

_RATES = tuple(SLOWEST_BITS * 10 ** (i / 3) for i in range(31))  # up to the fastest
_EXACT = 1.01
_FELT = 0.999  # of the dense step: what is nearer to it is rounding, where both hide behind the backward pass

Predict = Callable[[Calibration, str, Cluster], Prediction]
Pays = Callable[[float], bool]

_seconds = attrgetter("seconds")


@dataclass(frozen=True)
class Advice:
    """What to do.

    Attributes:
        ways: Every way's prediction, fastest first.
        dense: The better of float32 and bfloat16 DDP.
        choice: What to take; ``dense`` where compression does not pay, or might not.
        runner_up: The fastest that compresses and may be taken.
        optimizer: Its name. Accuracy is that of trainings with it, or with others like it.
        max_loss: How much more loss than dense training's is accepted, as a share of that.
    """

    ways: tuple[Prediction, ...]
    dense: Prediction
    choice: Prediction
    runner_up: Prediction | None = None
    optimizer: str = "SGD"
    max_loss: float = MAX_LOSS

    @property
    def compresses(self) -> bool:
        return self.choice.spec not in DENSE

    @property
    def speedup(self) -> float:
        """Of the choice over the better dense way."""
        return self.dense.seconds / self.choice.seconds

    @property
    def trial(self) -> Prediction:
        """What is worth some steps of training to someone who measures those, and goes back if it was not faster."""
        way = self.uncertain_gain
        return self.choice if way is None or self.dense.seconds <= (1 + TIE) * way.seconds else way

    @property
    def fastest(self) -> Prediction:
        """Of all that compress, also those that may not be taken."""
        return next(way for way in self.ways if way.spec not in DENSE)

    @property
    def uncertain_gain(self) -> Prediction | None:
        """A way that looks faster than dense, but not surely enough to be taken."""
        if self.compresses or self.runner_up is None or self.runner_up.seconds >= self.dense.seconds:
            return None
        return self.runner_up


def advise(
    calibration: Calibration,
    cluster: Cluster,
    specs: Sequence[str] = CANDIDATES,
    predictor: Predict = predict,
    error: float = ERROR,
    barred: Container[str] = (),
) -> Advice:
    """Weigh all candidates that were calibrated. What is ``barred`` is predicted, but not taken.

    Raises:
        ValueError: None of them was.
    """
    if not known(calibration, specs):
        raise ValueError(f"none of {', '.join(specs)} was calibrated; measured are {', '.join(calibration.costs)}")
    plain = [predictor(calibration, spec, cluster) for spec in plain_ways(calibration)]
    found = [predictor(calibration, spec, cluster) for spec in known(calibration, specs)]
    dense = min(plain, key=_seconds)
    fit = [way for way in found if way.spec not in barred]
    faster = [way for way in fit if way.seconds * (1 + TIE) < dense.seconds]
    extremes = list(corners(calibration, cluster, error))

    @cache
    def seconds_at(corner: int, spec: str) -> float:
        truth, place = extremes[corner]
        return predictor(truth, spec, place).seconds

    @cache
    def is_safe(spec: str) -> bool:
        """Whether a way is at no corner much slower than dense."""
        specs = plain_ways(calibration)
        return all(
            seconds_at(i, spec) <= (1 + LOSS) * min(seconds_at(i, dense) for dense in specs)
            for i in range(len(extremes))
        )

    fastest = next((way for way in sorted(faster, key=_seconds) if is_safe(way.spec)), None)
    choice = dense
    if fastest is not None:
        equals = [way for way in fit if way.seconds <= fastest.seconds * (1 + TIE)]
        choice = next(way for way in equals if is_safe(way.spec))
    runner_up = min(fit, key=_seconds, default=None)
    return Advice(tuple(sorted((*plain, *found), key=_seconds)), dense, choice, runner_up)


def known(calibration: Calibration, specs: Sequence[str]) -> list[str]:
    """Those that were calibrated."""
    return [spec for spec in specs if spec in calibration.costs]


def plain_ways(calibration: Calibration) -> list[str]:
    """Dense ways that were calibrated, and make a difference to gradients of this model's format."""
    return known(calibration, calibration.model.dense)


def corners(calibration: Calibration, cluster: Cluster, error: float) -> Iterator[tuple[Calibration, Cluster]]:
    """The extremes of what may be true, if every figure was measured to within a share of it.

    What coding costs errs for each way by itself, so dense ways are always as cheap as they may be.
    """
    ends = (1 / (1 + error), 1 / (1 - error))
    plain = {spec: calibration.costs[spec].scaled(ends[0]) for spec in known(calibration, DENSE)}
    for compute, codec, rate, delay in itertools.product(ends, repeat=4):
        truth = calibration.scaled(compute, codec)
        yield replace(truth, costs={**truth.costs, **plain}), replace(cluster, link=scaled(cluster.link, rate, delay))


def scaled(link: LinkSpec, rate: float = 1.0, delay: float = 1.0) -> LinkSpec:
    """A link whose rate and delay are others by some factor."""
    bits = None if link.rate_bits is None else min(FASTEST_BITS, max(SLOWEST_BITS, link.rate_bits * rate))
    return replace(link, rate_bits=bits, delay_seconds=link.delay_seconds * delay, jitter_seconds=0.0)


class RateRange(NamedTuple):
    """Rates of a link, in bits a second, from one to another."""

    low: float
    high: float


def break_even(calibration: Calibration, cluster: Cluster, spec: str, predictor: Predict = predict) -> RateRange | None:
    """The rates at which a way pays, around the cluster's own if it does there; None if it never does.

    Usually those below one of them. But a way that sends more bytes in fewer hops pays on fast links alone, if those
    are long, so rates are tried all the way in both directions.
    """

    def pays(bits: float) -> bool:
        there = replace(cluster, link=replace(cluster.link, rate_bits=bits))
        dense = min(predictor(calibration, each, there).seconds for each in plain_ways(calibration))
        return predictor(calibration, spec, there).seconds < _FELT * dense

    own = cluster.link.rate_bits or FASTEST_BITS
    start = next(filter(pays, (own, *reversed(_RATES))), None)
    if start is None:
        return None
    below = (rate for rate in reversed(_RATES) if rate < start)
    return RateRange(_end(pays, start, below), _end(pays, start, (rate for rate in _RATES if rate > start)))


def _end(pays: Pays, start: float, further: Iterable[float]) -> float:
    """How far one can go from a rate that pays, by rates that lie further and further away."""
    for rate in further:
        if not pays(rate):
            return _edge(pays, start, rate)
        start = rate
    return start


def _edge(pays: Pays, inner: float, outer: float) -> float:
    """The last rate that pays, between one that does and one that does not."""
    while max(inner / outer, outer / inner) > _EXACT:
        middle = (inner * outer) ** 0.5
        inner, outer = (middle, outer) if pays(middle) else (inner, middle)
    return inner
