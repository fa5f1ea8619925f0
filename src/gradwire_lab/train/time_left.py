"""Time left: how long the rest of some work will take, by what it took so far."""

import time
from collections.abc import Callable
from datetime import timedelta


class TimeLeft:
    """Counts pieces of work that take about as long as each other.

    Attributes:
        total: How many there are.
        done: How many are done.
    """

    def __init__(self, total: int, at_once: int = 1, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.done = total, 0
        self._at_once, self._clock, self._began, self._spent = at_once, clock, clock(), 0.0

    def finish(self, seconds: float | None = None) -> None:
        """One more is done, in so many seconds; by default in the time since the one before."""
        now = self._clock()
        self._spent += now - self._began if seconds is None else seconds
        self._began, self.done = now, self.done + 1

    def skip(self) -> None:
        """One more needs not be done."""
        self.total -= 1

    def after(self, line: str) -> str:
        """A line of progress, with the time that is left."""
        return "; ".join(filter(None, (line, self.text)))

    @property
    def text(self) -> str:
        """``about 0:01:30 left``; nothing before the first is done, and after the last."""
        left = self.total - self.done
        if not self.done or left <= 0:
            return ""
        return f"about {timedelta(seconds=round(self._spent / self.done * left / self._at_once))} left"
