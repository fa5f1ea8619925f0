"""Accuracy records: what the project's own trainings say of the accuracy under a spec.

`accuracy_records.jsonl` holds a line for each task, optimizer and spec that was compared with dense training. Lines of
run folders are made by ``python docs/results/accuracy_records.py RUNS...``; those of a GPT are the means of rows
under ``docs/results``, which a test compares them with.
"""

import json
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources

from gradwire.engine.method import method
from gradwire_lab.perf_model.candidates import arguments, local_rounds

MAX_LOSS = 0.01  # of dense training's: how much more loss is accepted, of single steps and of local ones


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
        kind: Of the model, as `ModelProfile.kind` tells.
        note: What else one should know.
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
    kind: str = ""
    note: str = ""

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
        in_percent, metric = "%" in self.metric, self.metric.removesuffix(" (%)")
        numbers = [self.difference, *(end for end in (self.low, self.high) if end is not None)]
        mean, *ends = (f"{one if in_percent else 100 * one / self.dense:+.2g}" for one in numbers)
        span = f" [{', '.join(ends)}]" if ends else ""
        unit = "points" if in_percent else "%"
        seeds = f"{self.seeds} seed{'s' * (self.seeds != 1)}"
        where = ", ".join(filter(None, (self.task, self.optimizer, seeds, self.note)))
        return f"{metric} {mean} {unit}{span} ({where})"


@cache
def accuracy_records() -> tuple[AccuracyRecord, ...]:
    """All that there is."""
    text = (resources.files("gradwire_lab.perf_model") / "accuracy_records.jsonl").read_text(encoding="utf-8")
    return tuple(AccuracyRecord(**json.loads(line)) for line in text.splitlines())


def optimizer_name(text: str) -> str:
    """An optimizer as its records spell it."""
    return next((one.optimizer for one in accuracy_records() if one.optimizer.lower() == text.lower()), text)


def is_adaptive(optimizer: str) -> bool:
    """Whether an optimizer of this name divides its steps by a second moment."""
    return optimizer.lower() not in ("sgd", "asgd", "rprop", "lbfgs")


def records_of(spec: str, optimizer: str = "sgd", kind: str = "") -> list[AccuracyRecord]:
    """What is weighed of a spec, whatever it was called in the run; of local steps, however long their start was."""
    return closest([one for one in accuracy_records() if _same(one.spec) == _same(spec)], optimizer, kind)


def closest(records: Sequence[AccuracyRecord], optimizer: str, kind: str = "") -> list[AccuracyRecord]:
    """Those that are weighed for an optimizer and a kind of model.

    Trainings with this optimizer, where there are any; else with one that is adaptive if this is, Muon aside, which
    steps matrices as a whole; else those there are. Of these, the trainings of this kind of model; else all.
    """
    own = [one for one in records if one.optimizer.lower() == optimizer.lower()]
    like = [one for one in records if one.optimizer != "Muon" and is_adaptive(one.optimizer) == is_adaptive(optimizer)]
    found = own or like or list(records)
    return [one for one in found if one.kind == kind] or found


def in_words(records: Iterable[AccuracyRecord]) -> str:
    """Of which kinds of models, and with which optimizers, trainings are."""
    pairs = sorted({(one.kind, one.optimizer) for one in records})
    return "trainings of " + " and ".join(f"{kind} models with {optimizer}" for kind, optimizer in pairs)


def free_of_losses(
    specs: Iterable[str], optimizer: str = "sgd", kind: str = "", max_loss: float = MAX_LOSS
) -> tuple[str, ...]:
    """Those without known losses: trainings lost at most ``max_loss`` on average, no task more for certain."""
    return tuple(spec for spec in specs if _bearable(records_of(spec, optimizer, kind), max_loss))


def _bearable(found: Sequence[AccuracyRecord], max_loss: float) -> bool:
    mean = sum(one.seeds * one.gain for one in found) / max(1, sum(one.seeds for one in found))
    return mean >= -max_loss and all(one.best is None or one.best >= -max_loss for one in found)


@cache
def _same(spec: str) -> Hashable:
    """What two specs share that are the same. A start tells them apart where it measures the variance to be frozen."""
    text, options = arguments(spec)
    made = method(text, options.get("feedback"), options.get("exchange"))
    rounds = local_rounds(spec.partition(";")[0])
    outer = None if rounds is None else replace(rounds, start=0, first=None)
    return (
        outer,
        made.last if made.gradient_steps else made.table,
        made.feedback,
        made.exchange,
        made.alone,
        made.refresh,
        made.gradient_steps if made.feedback.needs_denominator else 0,
    )
