"""Training time: what all steps of a training take and send, part by part."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from gradwire.engine.method import method
from gradwire_lab.perf_model.accuracy_records import AccuracyRecord, records_of
from gradwire_lab.perf_model.advice import Predict
from gradwire_lab.perf_model.calibration import Calibration
from gradwire_lab.perf_model.candidates import arguments, local_rounds
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import Prediction, predict
from gradwire_lab.perf_model.model import DENSE

STEPS = 1500  # of the trainings
START = "int4"  # how gradients of a start of local steps are sent


@dataclass(frozen=True)
class Phase:
    """Steps of a training that are synchronized in one way.

    Attributes:
        steps: How many.
        H: Steps of a round; None where gradients are sent.
        seconds: Of a step, with its share of a round. With a delay, messages would be hidden altogether.
        sent: Bytes that a worker sends for a step.
    """

    steps: int
    H: int | None
    seconds: float
    sent: float


@dataclass(frozen=True)
class TrainingTime:
    """A training of `STEPS`.

    Attributes:
        spec: How workers are synchronized.
        phases: Its parts: a start, if there is one, and all else.
    """

    spec: str
    phases: tuple[Phase, ...]

    @property
    def seconds(self) -> float:
        """Of a step of the last part."""
        return self.phases[-1].seconds

    @property
    def sent(self) -> float:
        """For a step of the last part."""
        return self.phases[-1].sent

    @property
    def total_seconds(self) -> float:
        """Of all steps, those of the start included."""
        return sum(phase.steps * phase.seconds for phase in self.phases)

    @property
    def total_sent(self) -> float:
        return sum(phase.steps * phase.sent for phase in self.phases)


@dataclass(frozen=True)
class SingleSteps(TrainingTime):
    """A training that sends every step, which local steps are compared with.

    Attributes:
        optimizer: Its name.
        unlimited_seconds: What all steps would take if the link had any rate.
        losses: The trainings that tell what it costs in loss.
    """

    optimizer: str
    unlimited_seconds: float
    losses: tuple[AccuracyRecord, ...]

    @property
    def mean_seconds(self) -> float:
        """Of a step, those of the start included."""
        return self.total_seconds / STEPS

    @property
    def increase(self) -> float | None:
        """About how much more loss than dense training, as a share of that; None, if it is not known."""
        seeds = sum(one.seeds for one in self.losses)
        known = -sum(one.seeds * one.gain for one in self.losses) / seeds if seeds else None
        return 0.0 if self.spec in DENSE else known


def single_steps(
    calibration: Calibration, cluster: Cluster, way: Prediction, optimizer: str, predictor: Predict = predict
) -> SingleSteps:
    """A training in one of the ways that send every step."""
    phases = tuple(_phases(calibration, cluster, way, predictor))
    wide = replace(cluster, link=replace(cluster.link, rate_bits=None))
    free = _phases(calibration, wide, predictor(calibration, way.spec, wide), predictor)
    found = [] if way.spec in DENSE else records_of(way.spec, optimizer, calibration.model.kind)
    losses = tuple(one for one in found if one.metric == "test loss")
    return SingleSteps(way.spec, phases, optimizer, sum(one.steps * one.seconds for one in free), losses)


def _phases(calibration: Calibration, cluster: Cluster, way: Prediction, predictor: Predict) -> Iterator[Phase]:
    """The start, if the spec has one, and all other steps."""
    left = STEPS
    for steps, codec in _start(way.spec):
        # A codec that was not measured is encoded as fast as that of a start.
        costs = {codec: calibration.costs.get(START, calibration.costs[way.spec]), **calibration.costs}
        sent = predictor(replace(calibration, costs=costs), codec, cluster)
        yield Phase(min(steps, left), None, sent.seconds, sent.sent)
        left -= min(steps, left)
    yield Phase(left, None, way.seconds, way.sent)


def _start(spec: str) -> list[tuple[int, str]]:
    """Steps of a start, and how gradients are sent in them."""
    if spec in DENSE:
        return []
    rounds = local_rounds(spec.partition(";")[0])
    if rounds is not None:
        return [(rounds.start, START)]
    made = method(arguments(spec)[0])
    parts = [(end - begin, str(codec)) for (begin, codec), (end, _) in pairwise(made.table)]
    return parts[: [step for step, _ in made.table].index(made.gradient_steps)] if made.gradient_steps else []
