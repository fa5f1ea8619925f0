"""Keepsakes: tables on a device that a recorded launch points at, and that must live as long as the recording.

Tables are kept in caches of limited size. That one is dropped there does no harm to whoever holds the tensor; but a
recording knows only where it lay.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_notes: list[list[Any]] = []  # of all who are recording just now, on whatever thread: to keep too much does no harm


@contextmanager
def keeping() -> Iterator[list[Any]]:
    """Until the end, whatever table is looked up is noted."""
    noted: list[Any] = []
    _notes.append(noted)
    try:
        yield noted
    finally:
        _notes[:] = [notes for notes in _notes if notes is not noted]


def keep(table: R) -> R:
    """Note a table, for whoever is recording."""
    for notes in _notes:
        notes.append(table)
    return table


def kept(size: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate what makes a table of hashable facts: the last ``size`` are cached, and recordings keep theirs."""

    def decorate(make: Callable[P, R]) -> Callable[P, R]:
        cached = lru_cache(maxsize=size)(make)

        @wraps(make)
        def found(*args: P.args, **named: P.kwargs) -> R:
            made: R = cached(*args, **named)  # type: ignore[arg-type]
            return keep(made) if _notes else made

        return found

    return decorate
