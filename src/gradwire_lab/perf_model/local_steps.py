"""Local steps in the forecast: how many of them hide a link that no spec of single steps is small enough for.

A round takes what its message takes to be encoded, sent and decoded, and is shared by H steps. Only rounds that were
trained are advised. What they cost in loss is among the `accuracy_records`: mostly of a GPT of 10.9 million parameters
with AdamW.
"""

import json
import math
from dataclasses import dataclass

from gradwire_lab.perf_model.accuracy_records import AccuracyRecord, accuracy_records, is_adaptive
from gradwire_lab.perf_model.advice import Predict
from gradwire_lab.perf_model.calibration import Calibration
from gradwire_lab.perf_model.candidates import SPARSE, local_rounds
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import Prediction, predict

WAITING = 0.1  # of its computing: what a step may take beside it
TOO_SLOW = 0.3  # the same: what no step should take
MAX_LOSS = 0.02  # of dense training's: how much more loss is accepted
TASK, STEPS = "WikiText-2 as bytes, gpt of 10.9 M", 1500  # that most of them were trained on, and for how long
_MOST = TASK, "AdamW"
START = "int4"  # how gradients of a start are sent
MESSAGES = (START, SPARSE)  # what is measured for them; the message of all rounds is that of one step
TRAINED = (  # as they were trained
    "sparseloco(H=1, keep=1.0, start=55, scales='bf16')",
    "sparseloco(H=5, rate=0.7, start=225, scales='bf16')",
    "sparseloco(H=15, start=225, scales='bf16')",
    "sparseloco(H=30, start=225, scales='bf16')",
)


@dataclass(frozen=True)
class LossEstimate:
    """About how much more loss than dense training.

    Attributes:
        increase: As a share of the dense loss.
        evidence: The trainings that say so.
    """

    increase: float
    evidence: tuple[AccuracyRecord, ...]

    def __str__(self) -> str:
        return f"about {100 * self.increase:.2g} % more loss, by trainings of a {TASK.split(', ')[-1]} with AdamW"


def expected_loss(spec: str) -> LossEstimate | None:
    """Of local steps, by the training with rounds of the same length; None where there was none."""
    trained = (one for one in _alike(spec) if (one.task, one.optimizer) == _MOST)
    found = next((one for one in trained if length(one.spec) == length(spec)), None)
    return None if found is None else LossEstimate(-found.gain, (found,))


def elsewhere(optimizer: str) -> list[AccuracyRecord]:
    """Trainings with such rounds and this optimizer, or of other models with AdamW."""
    rounds = [one for one in accuracy_records() if local_rounds(one.spec.partition(";")[0])]
    return [one for one in rounds if one.optimizer in ("AdamW", optimizer) and (one.task, one.optimizer) != _MOST]


def _alike(spec: str) -> list[AccuracyRecord]:
    """Trainings with rounds that are the same but for their length and their start."""
    rounds, family = local_rounds(spec), spec.partition("(")[0]
    assert rounds is not None
    found = [one for one in accuracy_records() if one.spec.startswith(f"{family}(")]
    kinds = ((one, local_rounds(one.spec)) for one in found)
    return [one for one, other in kinds if other and (other.rate, other.keep) == (rounds.rate, rounds.keep)]


def length(spec: str) -> int:
    """Steps of a round."""
    rounds = local_rounds(spec)
    assert rounds is not None
    return rounds.H


@dataclass(frozen=True)
class LocalAdvice:
    """Rounds of one length.

    Attributes:
        spec: For `gradwire.local`.
        codec: Beside it, if any.
        H: Steps of a round.
        seconds: Of a step, with its share of a round. With a delay, messages would be hidden altogether.
        sent: Bytes that a worker sends for a step.
        across: Whether differences are averaged inside hosts first.
    """

    spec: str
    codec: str | None
    H: int
    seconds: float
    sent: float
    across: bool = False

    @property
    def loss(self) -> LossEstimate | None:
        """What it is expected to cost, by trainings with rounds like these."""
        return expected_loss(self.spec)

    @property
    def call(self) -> str:
        """In Python."""
        texts = [text for text in (self.spec, self.codec) if text is not None]
        return (
            ", ".join(["gradwire.local(model, optimizer", *map(json.dumps, texts), *['across="hosts"'] * self.across])
            + ")"
        )


def trained_with(optimizer: str) -> bool:
    """Whether trainings with local steps say anything of an optimizer: with it, or with AdamW if it is adaptive."""
    return is_adaptive(optimizer) or any(one.optimizer == optimizer for one in elsewhere(optimizer))


def local_choices(
    calibration: Calibration,
    cluster: Cluster,
    predictor: Predict = predict,
    max_loss: float = MAX_LOSS,
    optimizer: str = "AdamW",
) -> tuple[list[LocalAdvice], LocalAdvice | None] | None:
    """Rounds of all lengths that were trained, and the one to take, if any; None: their message was not calibrated.

    To take is the shortest after which a step takes at most ``1 + WAITING`` of its computing, or else the longest, of
    those that lose at most ``max_loss``; nothing, where trainings say nothing of the optimizer.
    """
    if SPARSE not in calibration.costs:
        return None
    across = cluster.per_host > 1
    message = predictor(calibration, SPARSE, cluster)
    choices = [_round(message, spec, across) for spec in TRAINED if not (across and _keeps(spec))]
    limit = max_loss if trained_with(optimizer) else -math.inf
    allowed = [one for one in choices if one.loss is not None and one.loss.increase <= limit]
    enough = (one for one in allowed if one.seconds <= (1 + WAITING) * calibration.compute)
    return choices, next(enough, allowed[-1] if allowed else None)


def _round(message: Prediction, spec: str, across: bool) -> LocalAdvice:
    H = length(spec)
    way = message.shared(H)
    return LocalAdvice(spec, None, H, way.seconds, way.sent, across)


def _keeps(spec: str) -> bool:
    """Whether workers keep their errors, which those of a host cannot."""
    rounds = local_rounds(spec)
    return rounds is not None and rounds.keep > 0


def local_steps(
    calibration: Calibration, cluster: Cluster, predictor: Predict = predict, optimizer: str = "AdamW"
) -> LocalAdvice | None:
    """The rounds to take."""
    found = local_choices(calibration, cluster, predictor, optimizer=optimizer)
    return None if found is None else found[1]
