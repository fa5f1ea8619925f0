"""How long the rest of a grid of trainings will take, without the kernels that its first trainings compiled."""

import math
from collections import Counter
from collections.abc import Hashable, Iterable
from datetime import timedelta
from statistics import fmean


class GridTime:
    """Counts trainings by spec: those of one spec take about as long as each other.

    A command takes a while before it trains. Where it compiles kernels, that is up to a minute, but later commands find
    them on disk: so the shortest start is the one that counts.
    """

    def __init__(self, specs: Iterable[Hashable], at_once: int = 1) -> None:
        self._waiting, self._at_once = Counter(specs), at_once
        self._trained: dict[Hashable, float] = {}
        self._start = math.inf

    def skip(self, spec: Hashable) -> None:
        """One training less is to be done, and nothing is known of its time."""
        self._waiting[spec] -= 1

    def finish(self, spec: Hashable, trained: float, whole: float) -> None:
        """One training is done, in so many seconds of a command that took ``whole``."""
        self.skip(spec)
        self._trained[spec] = min(trained, self._trained.get(spec, math.inf))
        self._start = min(whole - trained, self._start)

    @property
    def text(self) -> str:
        """``about 0:01:30 left``; nothing before the first is done, and after the last."""
        known = dict(self._trained)
        if not known or not self._waiting.total():
            return ""
        usual = fmean(known.values())
        seconds = sum(count * (self._start + known.get(spec, usual)) for spec, count in self._waiting.items())
        return f"about {timedelta(seconds=round(seconds / self._at_once))} left"
