"""The table of a task: a line for each group, a column for each thing worth comparing."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gradwire_lab.report.groups import Group, Task
from gradwire_lab.report.load import Run
from gradwire_lab.report.numbers import difference, ends, in_bytes, in_seconds, mean_and_spread, ratio, rounded


@dataclass(frozen=True)
class Column:
    title: str
    numeric: bool = True


@dataclass(frozen=True)
class Cell:
    """What is read, and what it is sorted by: None for a word, the empty text for a number that is not known."""

    text: str
    key: float | str | None = None


def columns(task: Task) -> list[Column]:
    versus = [Column(f"against {against(task)}")] if _compares(task) else []
    skipped = [Column("skipped steps")] if _skips(task) else []
    return [
        Column("spec", numeric=False),
        Column("ranks"),
        Column("seeds"),
        Column(task.metric.axis),
        Column("95 % interval"),
        *versus,
        Column("payload ratio"),
        Column("wire ratio"),
        Column("sent by a rank"),
        Column("wall time"),
        *skipped,
    ]


def against(task: Task) -> str:
    """Whom the groups of a task are measured against, in words."""
    twins = task.twins
    return twins[0].label if len(twins) == 1 else "the dense twin"


def cells(task: Task, group: Group) -> list[Cell]:
    """One line, in the order of the columns."""
    told, metric = group.estimate, task.metric
    return [
        Cell(group.label if group.ended else f"{group.label} ({_standing(group)})"),
        Cell(ranks(group.runs[0]), group.runs[0].world),
        Cell(str(len(group.runs)), len(group.runs)),
        _known(told.mean, _outcome(group) or mean_and_spread(told)),
        _known(told.half_width, ends(told, metric.least, metric.most)),
        *([_lead(task, group)] if _compares(task) else []),
        _measured(group.mean("payload_ratio"), ratio),
        _measured(group.wire_ratio, ratio),
        _measured(group.mean("sent"), in_bytes),
        _measured(group.mean("seconds"), in_seconds),
        *([_skipped(group)] if _skips(task) else []),
    ]


def ranks(run: Run) -> str:
    """How many, and whether they were played by one process."""
    return f"{run.ranks} virtual" if run.start.get("virtual") else run.ranks


def _standing(group: Group) -> str:
    """How far the run that is furthest from its end has come."""
    behind = min((run for run in group.runs if not run.final), key=lambda run: float(run.last.get("step", 0)))
    steps, whole = float(behind.start.get("steps_per_epoch", 0)), float(behind.start.get("steps", 0))
    return f"unfinished: epoch {behind.last['epoch']:g} of {whole / steps:g}" if steps else "unfinished"


def _compares(task: Task) -> bool:
    return task.twin is not None and len(task.groups) > 1


def _skips(task: Task) -> bool:
    return any(group.skipped[0] for group in task.groups)


def _skipped(group: Group) -> Cell:
    skipped, steps = group.skipped
    return Cell(f"{skipped:,} of {steps:,}" if skipped else "0", skipped / max(1, steps))


def _outcome(group: Group) -> str:
    """That a metric means nothing, where it does: what diverged is no result."""
    if not group.diverged:
        return ""
    return "diverged" if group.diverged == len(group.runs) else f"{group.diverged} of {len(group.runs)} diverged"


def _lead(task: Task, group: Group) -> Cell:
    versus, twin = task.difference(group), task.twin_of(group)
    if versus is None or twin is None:
        return Cell("", "")
    if math.isnan(versus.mean):
        return Cell("diverged" if group.diverged else "the twin diverged", "")
    return Cell(difference(versus, task.metric.most - task.metric.least), rounded(versus.mean))


def _known(number: float | None, text: str) -> Cell:
    sorted_by = rounded(number)
    return Cell(text, "" if sorted_by is None else sorted_by)


def _measured(number: float | None, write: Callable[[float], str]) -> Cell:
    return Cell("", "") if number is None else Cell(write(number), number)
