"""Simulation: the same costs and the same decision, for clusters that nobody has rented.

A grid has a point for each model, with one batch size on one kind of machine, on each cluster: what dense training
takes there, what `auto` would choose, and what it gains or loses.
"""

import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gradwire.codecs.codec import codec
from gradwire.comm.alphabeta import AlphaBeta, seconds
from gradwire.comm.rates import LinkSpec
from gradwire.core.segments import Segments
from gradwire_lab.perf_model import h200
from gradwire_lab.perf_model.accuracy_records import free_of_losses
from gradwire_lab.perf_model.advice import ENOUGH, Advice, Predict, advise, known, scaled
from gradwire_lab.perf_model.calibration import Calibration
from gradwire_lab.perf_model.candidates import CANDIDATES, automatic
from gradwire_lab.perf_model.cluster import Algorithm, Cluster
from gradwire_lab.perf_model.costs import predict, predict_across
from gradwire_lab.perf_model.model import DENSE, ModelProfile
from gradwire_lab.perf_model.stragglers import Stragglers

WORKERS = (8, 64, 512, 4096)
LINKS = ("10mbit,20ms", "100mbit,5ms", "1gbit,500us", "25gbit,20us", "400gbit,5us")
CHOOSABLE = free_of_losses(automatic())  # what `auto` weighs
INSIDE = "3.6tbit,2us"  # NVLink of an H200: 450 GB/s in each direction, as published
MANY_EXPOSED = 0.25  # share of a dense step that is exposed communication, from which compression ought to pay
GAIN = 1.2  # by how much, there
GOSSIPED, NEIGHBORS = "sign", 2  # what workers on a ring tell each of their neighbors


@dataclass(frozen=True)
class SimulatedModel:
    """A model at work on one worker.

    Attributes:
        name: Of the model.
        batch: What a worker takes at a step, in words.
        model: Its tensors.
        seconds: Of forward and backward pass; the latter takes twice as long.
        note: Where that comes from.
        measured: All costs, where they were measured on the machine that is meant.
    """

    name: str
    batch: str
    model: ModelProfile
    seconds: float
    note: str = ""
    measured: Calibration | None = None

    def calibrated(self, world: int, specs: Iterable[str] = CANDIDATES) -> Calibration:
        """As measured, or on an H200 for each worker."""
        if self.measured is not None:
            return self.measured
        costs = {spec: h200.cost(self.model, spec, world) for spec in (*DENSE[:2], *specs)}
        return Calibration(self.model, self.seconds / 3, self.seconds * 2 / 3, costs, world=world, note=self.note)


@dataclass(frozen=True)
class SimulationPoint:
    """One point of a grid: a model on a cluster."""

    model_run: SimulatedModel
    cluster: Cluster
    across: bool = False

    @property
    def speakers(self) -> int:
        """Who exchanges compressed messages: workers, or hosts."""
        return self.cluster.hosts if self.across else self.cluster.workers

    @property
    def predictor(self) -> Predict:
        return predict_across if self.across else predict

    def __str__(self) -> str:
        way = f" in {self.cluster.hosts} hosts" if self.across else ""
        return (
            f"{self.model_run.name}, {self.model_run.batch}, {self.cluster.workers} workers{way}, {self.cluster.link}"
        )


def grid(
    simulated_models: Sequence[SimulatedModel],
    workers: Sequence[int] = WORKERS,
    links: Sequence[str] = LINKS,
    per_host: int = 1,
    algorithm: Algorithm = "best",
    inside: str = INSIDE,
) -> Iterator[SimulationPoint]:
    """Every model on every cluster; with more workers to a host, hierarchically."""
    for model_run in simulated_models:
        for count in workers:
            for link in links:
                spec = LinkSpec.parse(link)
                cluster = Cluster(count, spec, per_host, LinkSpec.parse(inside), algorithm)
                yield SimulationPoint(model_run, cluster, per_host > 1)


def judge(cell: SimulationPoint, stragglers: Stragglers = Stragglers()) -> dict[str, Any]:  # noqa: B008 - a frozen value
    """What `auto` would do in a cell, as a row."""
    uneven = stragglers.together(cell.cluster.workers)
    calibration = cell.model_run.calibrated(cell.speakers, CHOOSABLE).scaled(compute=uneven)
    found = advise(calibration, cell.cluster, CHOOSABLE, cell.predictor)
    bf16 = cell.predictor(calibration, "ddp-bf16", cell.cluster)
    best, choice = found.fastest, cell.predictor(calibration, _tried(cell, calibration, found), cell.cluster)
    return {
        "model": cell.model_run.name,
        "batch": cell.model_run.batch,
        "workers": cell.cluster.workers,
        "per_host": cell.cluster.per_host,
        "link": str(cell.cluster.link),
        "algorithm": cell.cluster.algorithm,
        "parameters": calibration.model.elements,
        "compute_seconds": calibration.compute,
        "ddp_fp32_seconds": cell.predictor(calibration, "ddp-fp32", cell.cluster).seconds,
        "ddp_bf16_seconds": bf16.seconds,
        "exposed": bf16.split.exposed / bf16.seconds,
        "choice": choice.spec,
        "assumed": cell.model_run.measured is None and h200.assumed(choice.spec),
        "seconds": choice.seconds,
        "speedup": bf16.seconds / choice.seconds,
        "fastest_compressed": best.spec,
        "fastest_compressed_seconds": best.seconds,
        "compression_loses": best.seconds >= found.dense.seconds,
        "gossip_seconds": _gossiping(cell, stragglers),
        "ways": {way.spec: float(f"{way.seconds:.5g}") for way in found.ways},
        "waiting": uneven,
    }


def gossip(calibration: Calibration, cluster: Cluster) -> float:
    """Seconds of a step in which workers tell only their neighbors, after it: the bytes do not grow with the world."""
    cost = calibration.cost(GOSSIPED, NEIGHBORS + 1)
    shapes = calibration.model.shapes
    payload = codec(GOSSIPED).size(Segments(tuple(shapes), tuple(shapes.values())))
    wire = seconds("swap", NEIGHBORS * payload * cluster.per_host, NEIGHBORS + 1, AlphaBeta.of(cluster.link))
    return calibration.compute + cost.start + cost.encode + wire + cost.decode


def _gossiping(cell: SimulationPoint, stragglers: Stragglers) -> float | None:
    """The same beside the other ways of a cell; None where what neighbors would be told was not measured."""
    figures = cell.model_run.calibrated(NEIGHBORS + 1, (GOSSIPED,))
    if GOSSIPED not in figures.costs:
        return None
    return gossip(figures.scaled(compute=stragglers.in_a_ring(cell.cluster.workers)), cell.cluster)


@dataclass(frozen=True)
class ScoredDecision:
    """A decision on wrong figures, and what came of it on the true ones; speed-ups are over overlapped bfloat16 DDP.

    Attributes:
        cell: Where.
        choice: What `auto` stays with.
        speedup: By that.
        advised: By what was advised, with no trial to correct it.
        exposed: Communication that bfloat16 DDP waits for, as a share of its step.
    """

    cell: SimulationPoint
    choice: str
    speedup: float
    advised: float
    exposed: float

    @property
    def loses(self) -> bool:
        """More than two percent slower than not compressing, for someone who trusts the advice or for `auto`."""
        return min(self.speedup, self.advised) < 1 / 1.02

    @property
    def misses(self) -> bool:
        """Much to gain, and not gained."""
        return self.exposed > MANY_EXPOSED and self.speedup < GAIN


def inverted(cell: SimulationPoint, error: float, draw: random.Random) -> ScoredDecision:
    """Decide on figures that are off by ``error``, each of them up or down by itself, and score on the true ones."""
    truth = cell.model_run.calibrated(cell.speakers, CHOOSABLE)
    found = advise(*_mistaken(cell, truth, error, draw), CHOOSABLE, cell.predictor)
    choice = _tried(cell, truth, found)
    bf16, taken, advised = (
        cell.predictor(truth, spec, cell.cluster) for spec in ("ddp-bf16", choice, found.choice.spec)
    )
    exposed = bf16.split.exposed / bf16.seconds
    return ScoredDecision(cell, choice, bf16.seconds / taken.seconds, bf16.seconds / advised.seconds, exposed)


def _mistaken(
    cell: SimulationPoint, truth: Calibration, error: float, draw: random.Random
) -> tuple[Calibration, Cluster]:
    def off() -> float:
        return 1 + draw.choice((-1, 1)) * error

    seen = replace(truth.scaled(off()), costs={spec: cost.scaled(off()) for spec, cost in truth.costs.items()})
    return seen, replace(cell.cluster, link=scaled(cell.cluster.link, off(), off()))


def _tried(cell: SimulationPoint, truth: Calibration, found: Advice) -> str:
    """What `auto` stays with: it goes back from what turns out no faster than the dense steps before it."""
    trial, plain = (cell.predictor(truth, spec, cell.cluster).seconds for spec in (found.trial.spec, found.dense.spec))
    return found.trial.spec if trial < ENOUGH * plain else found.dense.spec


def best_possible(cell: SimulationPoint) -> float:
    """The largest gain over bfloat16 DDP that any candidate has, on true figures."""
    truth = cell.model_run.calibrated(cell.speakers, CHOOSABLE)
    bf16 = cell.predictor(truth, "ddp-bf16", cell.cluster).seconds
    ways = known(truth, (*DENSE, *CHOOSABLE))
    return bf16 / min((cell.predictor(truth, spec, cell.cluster).seconds for spec in ways), default=math.inf)
