"""Forecasts: how well predicted steps agree with measured ones, cell by cell of `gradwire bench network`.

For every model and number of ranks, computing, compressing and collectives are calibrated as the benchmark ran them:
in hosts of their own, but on links that are no hindrance. The shaped links are only computed.
"""

import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from gradwire.bench.network import workloads
from gradwire.bench.network.calibrate import Job, calibrate, specs_of
from gradwire.bench.network.cells import Row
from gradwire.bench.network.contestants import SILENT
from gradwire.forecast.advice import advise
from gradwire.forecast.calibration import Calibration, load
from gradwire.forecast.candidates import arguments
from gradwire.forecast.cluster import Cluster
from gradwire.forecast.costs import predict
from gradwire.forecast.evidence import sound
from gradwire.forecast.model import DENSE
from gradwire.links.rates import LinkSpec
from gradwire.network.hosts import Hosts

TOLERANCE = 0.15  # of a measured step, within which predictions should lie
REGRET = 0.05  # by how much a choice may be slower than the best that was measured

Tell = Callable[[str], object]


@dataclass(frozen=True)
class Compared:
    """One cell: predicted and measured seconds."""

    row: Row
    predicted: float

    @property
    def measured(self) -> float:
        return float(self.row["step_ms"]) / 1e3

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def told(self) -> dict[str, Any]:
        """As a row."""
        kept = {name: self.row[name] for name in ("model", "link", "world", "where", "method", "step_ms")}
        return {**kept, "predicted_ms": 1e3 * self.predicted, "error": self.error}


@dataclass(frozen=True)
class Picked:
    """What advice would have taken in a field, and how that compares with the best that was measured.

    Attributes:
        sound: Whether only ways were weighed that nothing speaks against, as `gradwire advise` does unless told which.
    """

    model: str
    link: str
    world: int
    choice: str
    best: str
    regret: float
    sound: bool

    def told(self) -> dict[str, Any]:
        return asdict(self)


def compare(rows: Iterable[Row], tell: Tell = lambda line: None) -> Iterator[Compared | Picked]:
    """Predict every cell that was measured and can be predicted: not torch's PowerSGD, and no gossip."""
    whole = sorted((row for row in rows if "step_ms" in row), key=_field)
    for (model, world, where), same in groupby(whole, key=_field):
        found = list(same)
        specs = tuple(filter(_known, specs_of(dict.fromkeys(row["method"] for row in found))))
        tell(f"calibrating {model} with {world} ranks: {', '.join(specs)}")
        figures = calibrated(model, specs, world, where)
        yield from _predicted(found, figures, specs)
        for link, there in groupby(sorted(found, key=lambda row: row["link"]), key=lambda row: row["link"]):
            yield from _picked(list(there), figures, specs, link)


def calibrated(model: str, specs: Sequence[str], world: int, where: str) -> Calibration:
    """Measure where the benchmark was measured."""
    if where != "hosts":
        return calibrate(Job(partial(workloads.load, model), tuple(specs), world), world)
    with tempfile.TemporaryDirectory() as folder, Hosts(world, LinkSpec()) as hosts:
        path = Path(folder, "figures.json")
        words = [sys.executable, "-m", "gradwire.bench.network.calibrate", model, str(path), *specs]
        ended = hosts.run(words, sink=lambda rank, line: None)
        if ended.code:
            raise ValueError(f"calibrating {model} with {world} ranks failed: {ended.why}")
        return load(path)


def _field(row: Row) -> tuple[str, int, str]:
    return row["model"], row["world"], row["where"]


def _known(spec: str) -> bool:
    try:
        arguments(spec)
    except ValueError:
        return False
    return True


def _predicted(rows: Sequence[Row], figures: Calibration, specs: Sequence[str]) -> Iterator[Compared]:
    for row in rows:
        method = row["method"]
        if method == SILENT:
            yield Compared(row, figures.compute)
        elif method in DENSE or method in specs:
            cluster = Cluster(row["world"], LinkSpec.parse(row["link"]))
            yield Compared(row, predict(figures, method, cluster).seconds)


def _picked(rows: Sequence[Row], figures: Calibration, specs: Sequence[str], link: str) -> Iterator[Picked]:
    """Of all that was measured, and of what may be taken without being asked for."""
    measured = {row["method"]: row["step_ms"] for row in rows if row["method"] in (*DENSE, *specs)}
    for careful in (False, True):
        there = dict(measured)
        if careful:
            there = {way: ms for way, ms in measured.items() if way in DENSE or way in sound(specs)}
        weighed = [way for way in there if way not in DENSE]
        if len(weighed) == len(there) or not weighed:
            return
        known = replace(figures, costs={way: figures.costs[way] for way in there})
        cluster = Cluster(rows[0]["world"], LinkSpec.parse(link))
        choice = advise(known, cluster, weighed).choice.spec
        best = min(there, key=lambda way: there[way])
        regret = there[choice] / there[best] - 1
        yield Picked(rows[0]["model"], link, cluster.workers, choice, best, regret, careful)
