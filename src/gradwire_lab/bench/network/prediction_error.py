"""Prediction error: how well predicted steps agree with measured ones, cell by cell of `gradwire bench network`.

For every model and number of ranks, computing, compressing and collectives are calibrated as the benchmark ran them:
in hosts of their own, but on links that are no hindrance. The shaped links are only computed.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import Any

from gradwire.comm.rates import LinkSpec
from gradwire.engine.plan import BUCKET_BYTES
from gradwire_lab.bench.network import workloads
from gradwire_lab.bench.network.calibrate import CalibrationJob, calibrate, calibrate_in
from gradwire_lab.bench.network.grid import Row
from gradwire_lab.bench.network.methods import AUTO, NO_COMM
from gradwire_lab.bench.network.runner import Print
from gradwire_lab.network.hosts import Hosts
from gradwire_lab.perf_model.accuracy_records import free_of_losses
from gradwire_lab.perf_model.advice import advise
from gradwire_lab.perf_model.calibration import Calibration
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import predict
from gradwire_lab.perf_model.model import DENSE
from gradwire_lab.train.time_left import TimeLeft

TOLERANCE = 0.15  # of a measured step, within which predictions should lie
REGRET = 0.05  # by how much a choice may be slower than the best that was measured

_SIZES = ("bucket_mb", "launch_mb")  # of buckets; the second in rows of an earlier release

_CALIBRATED = itemgetter("model", "world", "where")  # what has a calibration of its own


@dataclass(frozen=True)
class StepComparison:
    """One cell: predicted and measured seconds."""

    row: Row
    predicted: float

    @property
    def measured(self) -> float:
        return float(self.row["step_ms"]) / 1e3

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def as_row(self) -> dict[str, Any]:
        """As a row."""
        cell = {name: self.row[name] for name in ("model", "link", "world", "where", "method", "step_ms")}
        return {**cell, "predicted_ms": 1e3 * self.predicted, "error": self.error}


@dataclass(frozen=True)
class ChoiceComparison:
    """What advice would have taken in a field, and how that compares with the best that was measured.

    Attributes:
        sound: Whether only ways were weighed without known losses of accuracy, as `gradwire advise` does by default.
    """

    model: str
    link: str
    world: int
    choice: str
    best: str
    regret: float
    sound: bool

    def as_row(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Way:
    """A method of the benchmark as forecasts know it.

    Attributes:
        spec: A dense way, or the arguments of `gradwire.compress` that decide about costs.
        bucket_bytes: Of gradients that travel together.
    """

    spec: str
    bucket_bytes: int = BUCKET_BYTES

    @staticmethod
    def of(method: str) -> "Way | None":
        """What a method is; None for one that cannot be predicted: torch's PowerSGD, gossip, local steps, ``auto``."""
        if method in DENSE:
            return Way(method)
        if method == AUTO or method.startswith(("ddp-", "gossip:", "local:")):
            return None
        spec, *options = (part.strip() for part in method.split(";"))
        sizes = [option.partition("=")[2] for option in options if option.startswith(_SIZES)]
        # Without rollback the same bytes are sent.
        rest = [option for option in options if not option.startswith((*_SIZES, "rollback"))]
        return Way("; ".join([spec, *rest]), int(float(sizes[-1]) * 2**20) if sizes else BUCKET_BYTES)


def compare(rows: Iterable[Row], report: Print = lambda line: None) -> Iterator[StepComparison | ChoiceComparison]:
    """Predict every cell that was measured and can be predicted: not torch's PowerSGD, no gossip, no local steps."""
    whole = sorted((row for row in rows if "step_ms" in row), key=_CALIBRATED)
    left = TimeLeft(len(set(map(_CALIBRATED, whole))))
    for (model, world, where), same in groupby(whole, key=_CALIBRATED):
        found = list(same)
        ways = [way for row in found if (way := Way.of(row["method"])) is not None]
        specs = tuple(dict.fromkeys(way.spec for way in ways if way.spec not in DENSE))
        report(left.after(f"calibrating {model} with {world} ranks: {', '.join(specs)}"))
        figures = calibrated(model, specs, world, where)
        left.finish()
        yield from _predicted(found, figures)
        for _, there in groupby(sorted(found, key=itemgetter("link")), key=itemgetter("link")):
            yield from _picked(list(there), figures)


def calibrated(model: str, specs: Sequence[str], world: int, where: str) -> Calibration:
    """Measure where the benchmark was measured."""
    job = CalibrationJob(partial(workloads.load, model), tuple(specs), world)
    if where != "hosts":
        return calibrate(job, world)
    with Hosts(world, LinkSpec()) as hosts:
        return calibrate_in(hosts, job)


def _cluster(row: Row) -> Cluster:
    return Cluster(row["world"], LinkSpec.parse(row["link"]))


def _predicted(rows: Sequence[Row], figures: Calibration) -> Iterator[StepComparison]:
    for row in rows:
        way = Way.of(row["method"])
        if row["method"] == NO_COMM:
            yield StepComparison(row, figures.compute)
        elif way is not None:
            yield StepComparison(
                row, predict(figures, way.spec, _cluster(row), bucket_sizes=(way.bucket_bytes,)).seconds
            )


def _picked(rows: Sequence[Row], figures: Calibration) -> Iterator[ChoiceComparison]:
    """Of all that was measured, and of what may be taken without being asked for; by what `auto` would try."""
    measured = {way: row["step_ms"] for row in rows if (way := Way.of(row["method"])) is not None}
    row = rows[0]
    for careful in (False, True):
        specs = dict.fromkeys(way.spec for way in measured if way.spec not in DENSE)
        weighed = list(free_of_losses(specs) if careful else specs)
        there = {way: ms for way, ms in measured.items() if way.spec in (*DENSE, *weighed)}
        if not weighed or not any(way.spec in DENSE for way in there):
            return
        known = replace(figures, costs={spec: figures.costs[spec] for spec in dict.fromkeys(way.spec for way in there)})
        choice = advise(known, _cluster(row), weighed).trial
        best = min(there, key=lambda way: there[way])
        same = [way for way in there if way.spec == choice.spec]
        taken = min(same, key=lambda way: abs(way.bucket_bytes - choice.bucket_bytes))
        regret = there[taken] / there[best] - 1
        yield ChoiceComparison(row["model"], row["link"], row["world"], taken.spec, best.spec, regret, careful)
