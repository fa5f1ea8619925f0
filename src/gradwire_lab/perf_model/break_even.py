"""Break-even: at which rates of the link a way to synchronize is faster than dense training.

Usually below one of them. But a way that sends more bytes in fewer hops pays on fast links alone, if those are long, so
rates are tried all the way in both directions.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

from gradwire.comm.rates import FASTEST_BITS, SLOWEST_BITS
from gradwire_lab.perf_model.advice import Predict, plain_ways
from gradwire_lab.perf_model.calibration import Calibration
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import predict

_RATES = tuple(SLOWEST_BITS * 10 ** (i / 3) for i in range(31))  # up to the fastest
_EXACT = 1.01
_FELT = 0.999  # of the dense step: what is nearer to it is rounding, where both hide behind the backward pass

Pays = Callable[[float], bool]


class RateRange(NamedTuple):
    """Rates of a link, in bits a second, from one to another."""

    low: float
    high: float


def break_even(calibration: Calibration, cluster: Cluster, spec: str, predictor: Predict = predict) -> RateRange | None:
    """The rates at which a way pays, around the cluster's own if it does there; None if it never does."""

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
