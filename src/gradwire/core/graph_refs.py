"""Graph references: tables on a device that a captured graph reads, and that must live as long as the graph.

Tables are cached, and caches are of limited size. A graph knows only the address of a table, so that it needs a
reference of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

_captures: list[list[Any]] = []  # of all threads: to hold a table too many does no harm


@contextmanager
def pin_tables() -> Iterator[list[Any]]:
    """Until the end, every table that is looked up is added to the list."""
    tables: list[Any] = []
    _captures.append(tables)
    try:
        yield tables
    finally:
        _captures[:] = [each for each in _captures if each is not tables]


def pin(table: R) -> R:
    """Add a table to those of all captures."""
    for tables in _captures:
        tables.append(table)
    return table


def cached_on_device(size: int) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate what makes a table of hashable facts: the last ``size`` are cached, and captures pin theirs."""

    def decorate(make: Callable[P, R]) -> Callable[P, R]:
        cached = lru_cache(maxsize=size)(make)

        @wraps(make)
        def lookup(*args: P.args, **named: P.kwargs) -> R:
            table: R = cached(*args, **named)  # type: ignore[arg-type]
            return pin(table) if _captures else table

        return lookup

    return decorate
