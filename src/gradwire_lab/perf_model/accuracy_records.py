"""Accuracy records: what the project's own trainings say of the accuracy under a spec.

`accuracy_records.jsonl` holds a line for each task and spec that was compared with dense training over several seeds.
``python -m gradwire_lab.cli.accuracy_records RUNS...`` makes it from run folders.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

from gradwire.engine.method import Method, method
from gradwire_lab.perf_model.candidates import arguments

LOST = 0.01  # share of the metric


@dataclass(frozen=True)
class AccuracyRecord:
    """One comparison with dense training.

    Attributes:
        spec: What was compared.
        task: What was learned by what.
        metric: What it was judged by.
        workers: How many ranks.
        seeds: How many pairs of runs.
        dense: The mean of the dense runs of the same seeds.
        difference: The mean of the differences, seed by seed; negative is lower.
        low: The lower end of its 95 % interval; None with one seed, or if all differ alike.
        high: The upper end.
        payload_ratio: Float32 bytes over bytes encoded.
        larger_is_better: Of the metric.
        optimizer: That stepped in both.
    """

    spec: str
    task: str
    metric: str
    workers: int
    seeds: int
    dense: float
    difference: float
    low: float | None
    high: float | None
    payload_ratio: float | None = None
    larger_is_better: bool = True
    optimizer: str = "SGD"

    @property
    def gain(self) -> float:
        """The difference as a share of the dense runs' mean; negative is worse."""
        return self._share(self.difference)

    @property
    def best(self) -> float | None:
        """The better end of its interval, as a share as well."""
        end = self.high if self.larger_is_better else self.low
        return None if end is None else self._share(end)

    def _share(self, difference: float) -> float:
        return difference / self.dense * (1 if self.larger_is_better else -1)

    def __str__(self) -> str:
        span = "" if self.low is None or self.high is None else f" [{_signed(self.low)}, {_signed(self.high)}]"
        seeds = f"{self.seeds} seed{'s' * (self.seeds != 1)}"
        what = "" if self.larger_is_better else f" {self.metric} (less is better)"
        return f"{_signed(self.difference)}{span}{what} on {self.task}, {self.optimizer}, {seeds}"


def _signed(number: float) -> str:
    return f"{number:+.2f}" if abs(number) >= 0.1 or not number else f"{number:+.2g}"


@cache
def accuracy_records() -> tuple[AccuracyRecord, ...]:
    """All that there is."""
    text = (resources.files("gradwire_lab.perf_model") / "accuracy_records.jsonl").read_text(encoding="utf-8")
    return tuple(AccuracyRecord(**json.loads(line)) for line in text.splitlines())


def is_adaptive(optimizer: str) -> bool:
    """Whether an optimizer of this name divides its steps by a second moment."""
    return optimizer.lower() not in ("sgd", "asgd", "rprop", "lbfgs")


def records_of(spec: str, adaptive: bool = False) -> list[AccuracyRecord]:
    """What is known of a spec, whatever it was called in the run.

    Trainings with an ``adaptive`` optimizer, or with another one, where there are any; else those there are.
    """
    found = [one for one in accuracy_records() if _same(one.spec) == _same(spec)]
    return [one for one in found if is_adaptive(one.optimizer) == adaptive] or found


def free_of_losses(specs: Iterable[str], adaptive: bool = False) -> tuple[str, ...]:
    """Those without known losses: trainings lost less than a percent on average, none more for certain."""
    return tuple(spec for spec in specs if _bearable(records_of(spec, adaptive)))


def _bearable(found: Sequence[AccuracyRecord]) -> bool:
    mean = sum(one.gain for one in found) / len(found) if found else 0.0
    return mean > -LOST and all(one.best is None or one.best > -LOST for one in found)


@cache
def _same(spec: str) -> Method:
    text, options = arguments(spec)
    return method(text, options.get("feedback"), options.get("exchange"))
