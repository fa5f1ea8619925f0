"""Local steps in the forecast: how many of them hide a link that no spec of single steps is small enough for.

A round takes what its message takes to be encoded, sent and decoded, and is shared by H steps. The message of
`sparseloco` has about the size and the cost of ``topk(0.01) | sign``, which was calibrated; that of `diloco` with int4
those of ``int4``.

What that costs in loss is known by the project's own trainings. Their rows are those of
``docs/results/local-h200.jsonl``: a GPT of 10.9 million parameters on the bytes of WikiText-2, eight workers with
AdamW, 1,500 steps, the first 225 by gradients in int4, against dense training of the same schedule.
"""

import math
from dataclasses import dataclass

from gradwire_lab.perf_model.advice import Predict, known
from gradwire_lab.perf_model.calibration import Calibration
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import predict

TASK = "a GPT of 10.9 M parameters, 8 workers, 1,500 steps, the first 225 by gradients, against the same schedule"
WAITING = 0.1  # of its computing: what a step may take beside it
TOO_SLOW = 0.3  # the same: what no step should take
LONGEST = 500  # steps of a round
MESSAGES = {
    "int4": ("diloco(H={H}, start=256)", "int4"),
    "topk(0.01) | sign": ("sparseloco(H={H}, start=256)", None),
}


@dataclass(frozen=True)
class LocalRecord:
    """One comparison with dense training.

    Attributes:
        method: The preset.
        H: Steps of a round.
        name: Of the rows.
        seeds: Of the runs, and of the dense ones beside them.
        increase: Of the test loss, as a share of the dense one.
    """

    method: str
    H: int
    name: str
    seeds: tuple[int, ...]
    increase: float

    def __str__(self) -> str:
        return f"{100 * self.increase:+.1f} % at H = {self.H} ({len(self.seeds)} seed{'s' * (len(self.seeds) > 1)})"


RECORDS = (
    LocalRecord("sparseloco", 5, "center", (0, 1, 2), 0.0134),
    LocalRecord("sparseloco", 15, "H 15", (0,), 0.0457),
    LocalRecord("sparseloco", 30, "H 30", (0,), 0.0853),
    LocalRecord("diloco", 30, "diloco H 30", (0,), 0.0905),
)


@dataclass(frozen=True)
class LossEstimate:
    """About how much more loss than dense training.

    Attributes:
        increase: As a share of the dense loss.
        at_least: Whether rounds are longer than any that was trained with, so that it may be much more.
        evidence: The trainings next to it.
    """

    increase: float
    at_least: bool
    evidence: tuple[LocalRecord, ...]

    def __str__(self) -> str:
        about = "at least" if self.at_least else "about"
        return f"{about} {100 * self.increase:.2g} % more loss: {', '.join(map(str, self.evidence))}, of {TASK}"


def expected_loss(method: str, H: int) -> LossEstimate | None:
    """Between the trainings with the next shorter and longer rounds, by the logarithm of H; None without any."""
    known = sorted((one for one in RECORDS if one.method == method), key=lambda one: one.H)
    if not known:
        return None
    shorter, longer = [one for one in known if one.H <= H], [one for one in known if one.H > H]
    if not shorter or not longer:
        nearest = (shorter or longer[:1])[-1]
        return LossEstimate(nearest.increase, nearest.H < H, (nearest,))
    low, high = shorter[-1], longer[0]
    share = math.log(H / low.H) / math.log(high.H / low.H)
    return LossEstimate(low.increase + share * (high.increase - low.increase), False, (low, high))


@dataclass(frozen=True)
class LocalAdvice:
    """Rounds that keep a link from slowing steps down.

    Attributes:
        spec: For `gradwire.local`.
        codec: Beside it, if any.
        H: Steps of a round.
        seconds: Of a step, with its share of a round. With a delay, messages would be hidden altogether.
        sent: Bytes that a worker sends for a step.
    """

    spec: str
    codec: str | None
    H: int
    seconds: float
    sent: float

    @property
    def loss(self) -> LossEstimate | None:
        """What it is expected to cost, by trainings with rounds like these."""
        return expected_loss(self.spec.partition("(")[0], self.H)

    @property
    def call(self) -> str:
        """In Python."""
        codec = "" if self.codec is None else f', "{self.codec}"'
        return f'gradwire.local(model, optimizer, "{self.spec}"{codec})'


def local_steps(calibration: Calibration, cluster: Cluster, predictor: Predict = predict) -> LocalAdvice | None:
    """The shortest rounds after which a step takes at most ``1 + WAITING`` of its computing; None: not calibrated."""
    found = []
    for message in known(calibration, tuple(MESSAGES)):
        way, (spec, codec) = predictor(calibration, message, cluster), MESSAGES[message]
        split = way.split
        round_seconds = split.encode + split.wire + split.decode
        steps = min(LONGEST, max(1, math.ceil(round_seconds / (WAITING * calibration.compute))))
        seconds = calibration.compute + round_seconds / steps
        found.append(LocalAdvice(spec.format(H=steps), codec, steps, seconds, way.sent / steps))
    return min(found, key=lambda one: one.H, default=None)
