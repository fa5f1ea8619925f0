"""What local steps cost in loss, by the project's own trainings.

The rows are those of ``docs/results/local-h200.jsonl``: a GPT of 10.9 million parameters on the bytes of WikiText-2,
eight workers with AdamW, 1,500 steps, the first 225 by gradients in int4.
"""

import math
from dataclasses import dataclass

TASK = "a GPT of 10.9 M parameters, 8 workers, 1,500 steps, the first 225 by gradients"


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
