"""Simulation: the same costs and the same decision, for clusters that are not at hand.

A grid has a point for each model, with one batch size on one kind of machine, on each cluster: what dense training
takes there, what `auto` would choose, and what it gains or loses.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.codecs.codec import codec
from gradwire.comm.alphabeta import AlphaBeta, seconds
from gradwire.comm.rates import LinkSpec
from gradwire.core.segments import Segments
from gradwire_lab.perf_model import h200
from gradwire_lab.perf_model.accuracy_records import free_of_losses
from gradwire_lab.perf_model.advice import ENOUGH, Advice, Predict, advise
from gradwire_lab.perf_model.calibration import Calibration
from gradwire_lab.perf_model.candidates import CANDIDATES, automatic
from gradwire_lab.perf_model.cluster import Algorithm, Cluster
from gradwire_lab.perf_model.costs import predict, predict_across
from gradwire_lab.perf_model.local_steps import MESSAGES, local_choices, to_take
from gradwire_lab.perf_model.model import DENSE, ModelProfile
from gradwire_lab.perf_model.stragglers import Stragglers
from gradwire_lab.perf_model.training_time import STEPS

WORKERS = (8, 64, 512, 4096)
LINKS = ("10mbit,20ms", "100mbit,5ms", "1gbit,500us", "25gbit,20us", "400gbit,5us")
CHOOSABLE = free_of_losses(automatic())  # what `auto` weighs
ADAPTIVE = free_of_losses(automatic(adaptive=True), "AdamW")  # the same with AdamW, whose local steps are compared
INSIDE = "3.6tbit,2us"  # NVLink of an H200: 450 GB/s in each direction, as published
GOSSIPED, NEIGHBORS = "sign", 2  # what workers on a ring send to each of their neighbors


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
    def parties(self) -> int:
        """How many exchange compressed messages: workers, or hosts."""
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
    calibration = cell.model_run.calibrated(cell.parties, (*CHOOSABLE, *MESSAGES)).scaled(compute=uneven)
    found = advise(calibration, cell.cluster, CHOOSABLE, cell.predictor)
    bf16 = cell.predictor(calibration, "ddp-bf16", cell.cluster)
    best, choice = found.fastest, cell.predictor(calibration, settled_spec(cell, calibration, found), cell.cluster)
    single = next(way for way in found.ways if way.spec in (*DENSE, *ADAPTIVE))
    trained = local_choices(calibration, cell.cluster, cell.predictor) or ()
    rounds = to_take(trained, STEPS * single.seconds)
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
        "local_H": None if rounds is None else rounds.H,
        "local_seconds": None if rounds is None else rounds.seconds,
        "local_loss": None if rounds is None else rounds.increase,
        "local_total_seconds": None if rounds is None else rounds.total_seconds,
        "adamw_choice": single.spec,
        "adamw_seconds": single.seconds,
        "ways": {way.spec: float(f"{way.seconds:.5g}") for way in found.ways},
        "waiting": uneven,
    }


def gossip(calibration: Calibration, cluster: Cluster) -> float:
    """Seconds of a step after which workers exchange with their neighbors alone: bytes do not grow with the world."""
    cost = calibration.cost(GOSSIPED, NEIGHBORS + 1)
    shapes = calibration.model.shapes
    payload = codec(GOSSIPED).size(Segments(tuple(shapes), tuple(shapes.values())))
    wire = seconds("swap", NEIGHBORS * payload * cluster.per_host, NEIGHBORS + 1, AlphaBeta.of(cluster.link))
    return calibration.compute + cost.start + cost.encode + wire + cost.decode


def _gossiping(cell: SimulationPoint, stragglers: Stragglers) -> float | None:
    """The same for a cell; None where the coding of gossip was not measured."""
    figures = cell.model_run.calibrated(NEIGHBORS + 1, (GOSSIPED,))
    if GOSSIPED not in figures.costs:
        return None
    return gossip(figures.scaled(compute=stragglers.in_a_ring(cell.cluster.workers)), cell.cluster)


def settled_spec(cell: SimulationPoint, truth: Calibration, advice: Advice) -> str:
    """What `auto` stays with: it goes back from what turns out no faster than the dense steps before it."""
    trial, dense = advice.trial.spec, advice.dense.spec
    seconds_of = {spec: cell.predictor(truth, spec, cell.cluster).seconds for spec in (trial, dense)}
    return trial if seconds_of[trial] < ENOUGH * seconds_of[dense] else dense
