"""EmulationError: how well an emulated link agrees with hosts on shaped links, exchange by exchange."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gradwire_lab.bench.network.grid import Budget, Scenario, Where
from gradwire_lab.bench.network.runner import Print, measure

EXCHANGES = {
    "all-reduce": "fp16",
    "all-gather": "topk(0.02)",
    "two-way": "int8; exchange=two_way",
    "gossip": "gossip:choco(ring); codec=int8",
}


class EmulationError(NamedTuple):
    """Milliseconds of a step, measured in both places.

    Attributes:
        ratio: Emulated over shaped: 1 is perfect.
    """

    exchange: str
    method: str
    shaped: float
    emulated: float
    failed: str = ""

    @property
    def ratio(self) -> float:
        return self.emulated / self.shaped if self.shaped else 0.0


def compare(
    model: str, link: str, world: int, budget: Budget, report: Print, names: Sequence[str]
) -> Iterator[EmulationError]:
    """Measure the same steps among hosts and on an emulated link."""
    methods = [EXCHANGES[name] for name in names]
    found: dict[Where, dict[str, dict[str, float]]] = {}
    wrong: dict[str, str] = {}
    places: tuple[Where, Where] = ("hosts", "throttled")
    for where in places:
        rows = list(measure(Scenario(model, link, world, where), methods, budget, report))
        wrong |= {row["method"]: row["failed"] for row in rows if "failed" in row}
        found[where] = {row["method"]: row for row in rows if "failed" not in row}
    for name, method in zip(names, methods, strict=True):
        if method in wrong:
            yield EmulationError(name, method, 0.0, 0.0, wrong[method])
        else:
            shaped, emulated = (found[where][method]["step_ms"] for where in places)
            yield EmulationError(name, method, shaped, emulated)
