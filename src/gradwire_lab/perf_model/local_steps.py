"""Local steps in the forecast: how many of them hide a link that no spec of single steps is small enough for.

A round takes what its message takes to be encoded, sent and decoded, and is shared by H steps. The message of
`sparseloco` has about the size and the cost of ``topk(0.01) | sign``, which was calibrated; that of `diloco` with int4
those of ``int4``.
"""

import math
from dataclasses import dataclass

from gradwire_lab.perf_model.advice import Predict, known
from gradwire_lab.perf_model.calibration import Calibration
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import predict
from gradwire_lab.perf_model.local_evidence import LossEstimate, expected_loss

WAITING = 0.1  # of its computing: what a step may take beside it
TOO_SLOW = 0.3  # the same: what no step should take
LONGEST = 500  # steps of a round
MESSAGES = {"int4": ("diloco(H={H})", "int4"), "topk(0.01) | sign": ("sparseloco(H={H})", None)}


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


def local_steps(
    calibration: Calibration, cluster: Cluster, waiting: float = WAITING, predictor: Predict = predict
) -> LocalAdvice | None:
    """The shortest rounds after which a step takes at most ``1 + waiting`` of its computing; None: not calibrated."""
    found = []
    for message in known(calibration, tuple(MESSAGES)):
        way, (spec, codec) = predictor(calibration, message, cluster), MESSAGES[message]
        split = way.split
        round_seconds = split.encode + split.wire + split.decode
        steps = min(LONGEST, max(1, math.ceil(round_seconds / (waiting * calibration.compute))))
        seconds = calibration.compute + round_seconds / steps
        found.append(LocalAdvice(spec.format(H=steps), codec, steps, seconds, way.sent / steps))
    return min(found, key=lambda one: one.H, default=None)
