"""Local steps in the forecast: how many of them make a training clearly faster than the best of single steps.

A round takes what its message takes to be encoded, sent and decoded, and is shared by H steps, which may be more in the
later rounds of a schedule. Only rounds that were trained are advised. What they cost in loss is among the
`accuracy_records`: mostly of a GPT of 10.9 million parameters, with AdamW or with Muon.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from gradwire.local.method import LocalMethod
from gradwire_lab.perf_model.accuracy_records import (
    MAX_LOSS,
    AccuracyRecord,
    accuracy_records,
    closest,
    in_words,
    is_adaptive,
)
from gradwire_lab.perf_model.advice import Predict
from gradwire_lab.perf_model.calibration import Calibration
from gradwire_lab.perf_model.candidates import local_rounds
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import Prediction, predict
from gradwire_lab.perf_model.training_time import START, STEPS, Phase, SingleSteps, TrainingTime

ALIKE = 1.1  # times the time of the fastest training: among those, less loss is worth more
TOO_SLOW = 0.3  # the same: what no step should take
FASTER = 1.5  # times, of a whole training: two figures that are 15 % off may make 1.35 no gain
SPARSE = "sparseloco(H=1, keep=1.0, start=256, scales='bf16')"
MESSAGES = (START, SPARSE)  # what is measured for them; the message of all rounds is that of one step


def trainings(optimizer: str, kind: str = "") -> list[AccuracyRecord]:
    """Those with local steps that are weighed for an optimizer and a kind of model; none, if SGD was not trained so."""
    alike = (one for one in accuracy_records() if is_adaptive(one.optimizer) == is_adaptive(optimizer))
    return closest([one for one in alike if local_rounds(one.spec.partition(";")[0])], optimizer, kind)


def trained(optimizer: str, kind: str = "") -> list[AccuracyRecord]:
    """One training for each sequence of H, from the shortest: that with most seeds, then the best losses."""
    found: dict[tuple[int, ...], AccuracyRecord] = {}
    for one in sorted(trainings(optimizer, kind), key=lambda one: (one.seeds, -one.dense, one.gain)):
        if rounds_of(one.spec).message == rounds_of(SPARSE).message:
            found[lengths(one.spec)] = one
    return sorted(found.values(), key=lambda one: (lengths(one.spec)[-1], -one.gain))


def rounds_of(spec: str) -> LocalMethod:
    """The rounds that a spec of local steps stands for."""
    rounds = local_rounds(spec)
    assert rounds is not None
    return rounds


def lengths(spec: str) -> tuple[int, ...]:
    """Steps of a round: one number, or those of a schedule."""
    rounds = rounds_of(spec)
    return (rounds.H, *(later.H for _, later in rounds.later))


@dataclass(frozen=True)
class LocalAdvice(TrainingTime):
    """Rounds of one length, or of a schedule. The spec is for `gradwire.local`.

    Attributes:
        loss: The training that tells what they cost.
        across: Whether differences are averaged inside hosts first.
    """

    loss: AccuracyRecord
    across: bool = False

    @property
    def H(self) -> int:
        """Steps of the last rounds."""
        return lengths(self.spec)[-1]

    @property
    def lengths(self) -> str:
        """H, or each H of a schedule, with the steps from which they hold."""
        rounds = rounds_of(self.spec)
        return f"{rounds.H}" + "".join(f", then {later.H} from step {step:,}" for step, later in rounds.later)

    @property
    def increase(self) -> float:
        """About how much more loss than dense training, as a share of that."""
        return -self.loss.gain

    @property
    def loss_text(self) -> str:
        return f"about {100 * self.increase:.2g} % more loss, by {in_words([self.loss])}"

    @property
    def call(self) -> str:
        """In Python."""
        inner = "[muon, adamw]" if self.loss.optimizer == "Muon" else "optimizer"
        across = ', across="hosts"' * self.across
        return f"gradwire.local(model, {inner}, {json.dumps(self.spec)}{across})"


@dataclass(frozen=True)
class LocalComparison:
    """Local steps beside the best way that sends every step.

    Attributes:
        single: That way.
        choices: Rounds of all lengths that were trained.
        chosen: Those to take, if any.
        max_loss: How much more loss than dense training's is accepted, as a share of that.
    """

    single: SingleSteps
    choices: tuple[LocalAdvice, ...]
    chosen: LocalAdvice | None
    max_loss: float

    @property
    def loses_more(self) -> bool:
        """Whether those to take lose more than is accepted."""
        return self.chosen is not None and self.chosen.increase > self.max_loss


def local_comparison(
    calibration: Calibration,
    cluster: Cluster,
    single: SingleSteps,
    predictor: Predict = predict,
    max_loss: float = MAX_LOSS,
) -> LocalComparison | None:
    """All rounds, and those to take in place of single steps; None: their messages were not calibrated."""
    choices = local_choices(calibration, cluster, predictor, single.optimizer)
    if choices is None:
        return None
    return LocalComparison(single, choices, to_take(choices, single.total_seconds, max_loss), max_loss)


def local_choices(
    calibration: Calibration, cluster: Cluster, predictor: Predict = predict, optimizer: str = "AdamW"
) -> tuple[LocalAdvice, ...] | None:
    """Rounds of all lengths that were trained with an optimizer; None: their messages were not calibrated."""
    if not calibration.costs.keys() >= {*MESSAGES}:
        return None
    start, message = (predictor(calibration, spec, cluster) for spec in MESSAGES)
    across = cluster.per_host > 1
    records = [one for one in trained(optimizer, calibration.model.kind) if not (across and rounds_of(one.spec).keep)]
    return tuple(
        LocalAdvice(one.spec, tuple(_phases(rounds_of(one.spec), start, message)), one, across) for one in records
    )


def to_take(choices: Iterable[LocalAdvice], single_seconds: float, max_loss: float = MAX_LOSS) -> LocalAdvice | None:
    """The rounds to take, if any, where all `STEPS` take so long in single steps.

    They are `FASTER` times as fast at least, and lose at most ``max_loss``; where all of them lose more, as little as
    there is. Of the fastest of them, and those that take at most `ALIKE` times as long, it is the ones that lose least.
    """
    fast = [one for one in choices if FASTER * one.total_seconds <= single_seconds]
    limit = max(max_loss, min((one.increase for one in fast), default=0.0))
    allowed = [one for one in fast if one.increase <= limit]
    fastest = min((one.total_seconds for one in allowed), default=0.0)
    alike = (one for one in allowed if one.total_seconds <= ALIKE * fastest)
    return min(alike, key=lambda one: (one.increase, one.total_seconds), default=None)


def _phases(rounds: LocalMethod, start: Prediction, message: Prediction) -> Iterator[Phase]:
    """The start, if there is one, and the rounds."""
    if rounds.start:
        yield Phase(rounds.start, None, start.seconds, start.sent)
    for begin, end in pairwise((rounds.start, *(step for step, _ in rounds.later), STEPS)):
        H = rounds.after(begin).H
        share = message.shared(H)
        yield Phase(end - begin, H, share.seconds, share.sent)
