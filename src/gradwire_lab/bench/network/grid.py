"""Grid: what is to be measured, and what has been."""

from collections.abc import Iterable
from dataclasses import asdict, astuple, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from gradwire.comm.alphabeta import seconds
from gradwire.comm.rates import LinkSpec
from gradwire_lab.train.run_folder import json_lines

_FEWEST_STEPS, _SPARE = 4, 1.5  # of a turn; and for what a step is besides its wire

_KEYS = ("model", "link", "world", "where")
_BEGINNING = b'{"model"'  # of every row

Where = Literal["hosts", "throttled"]
Row = dict[str, Any]


@dataclass(frozen=True)
class Scenario:
    """What methods are compared on: they run in turns, in the same processes.

    Attributes:
        model: The workload.
        link: Every rank's, as text.
        world: How many ranks.
        where: In namespaces of their own, or on this host with an emulated link.
    """

    model: str
    link: str
    world: int
    where: Where

    def key(self, method: str) -> tuple[Any, ...]:
        return (*astuple(self), method)


@dataclass(frozen=True)
class Budget:
    """How long to measure.

    Attributes:
        rounds: How often each method has its turn, so that drifts of the machine hit all alike.
        steps: Of one turn.
        warmup: Steps that do not count, at the beginning of each turn.
        turn_seconds: A turn that would take longer has fewer steps, but two.
        timeout: Seconds of a turn after which a method is given up.
    """

    rounds: int = 3
    steps: int = 12
    warmup: int = 4
    turn_seconds: float = 20.0
    timeout: float = 300.0

    def __post_init__(self) -> None:
        for what, limit in (("a turn of", self.turn_seconds), ("a timeout of", self.timeout)):
            if not limit > 0:
                raise ValueError(f"{what} {limit:g} s is too short; give more than 0")


def read(path: Path | None) -> list[Row]:
    """Rows of earlier runs, of each cell the last; one that was cut short is none.

    Raises:
        ValueError: There is something else in the file, to which nothing should be appended.
    """
    if path is None or not path.exists():
        return []
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file for the rows")
    rows = [row for row in json_lines(path) if row.keys() >= {"method", *_KEYS}]
    if not rows and path.stat().st_size and not path.read_bytes().startswith(_BEGINNING):
        raise ValueError(f"{path} holds something else than rows of bench network; name another file")
    return latest(rows)


def latest(rows: Iterable[Row]) -> list[Row]:
    """Without those that were measured again later."""
    return list({key_of(row): row for row in rows}.values())


def key_of(row: Row) -> tuple[Any, ...]:
    return (*(row[key] for key in _KEYS), row["method"])


def missing(
    field: Scenario, methods: Iterable[str], rows: Iterable[Row], budget: Budget, retry: bool = False
) -> list[str]:
    """Methods without a row in this field, or whose row is a failure that need not happen again.

    Args:
        field: Where.
        methods: All that are wanted.
        rows: What there is, of each cell the last.
        budget: With a longer timeout than before, what timed out is tried again.
        retry: Try everything again that failed.
    """
    done = {key_of(row) for row in rows if not _again(row, budget, retry)}
    return [method for method in methods if field.key(method) not in done]


def _again(row: Row, budget: Budget, retry: bool) -> bool:
    if "failed" not in row:
        return False
    return retry or (row["failed"].startswith("timeout") and budget.timeout > row["pace"]["timeout"])


def with_timeout(budget: Budget, field: Scenario, nbytes: int) -> Budget:
    """A budget at which plain DDP's gradients of so many bytes get through a turn: two steps to begin with, and two."""
    step = seconds("all_reduce", nbytes, field.world, LinkSpec.parse(field.link))
    return replace(budget, timeout=max(budget.timeout, _SPARE * _FEWEST_STEPS * step))


def described(field: Scenario, method: str, budget: Budget) -> Row:
    return {**asdict(field), "method": method, "pace": asdict(budget)}
