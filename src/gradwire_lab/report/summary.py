"""The table of a task: a line for each group, a column for each thing worth comparing."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gradwire_lab.report.load import RunRecord
from gradwire_lab.report.numbers import difference, ends, in_bytes, in_seconds, mean_and_spread, ratio, rounded
from gradwire_lab.report.run_groups import Group, Task


@dataclass(frozen=True)
class TableColumn:
    title: str
    numeric: bool = True


@dataclass(frozen=True)
class TableCell:
    """What is read, and what it is sorted by: None for a word, the empty text for a number that is not known."""

    text: str
    key: float | str | None = None


def columns(task: Task) -> list[TableColumn]:
    versus = [TableColumn(f"against {against(task)}")] if _compares(task) else []
    skipped = [TableColumn("skipped steps")] if _skips(task) else []
    return [
        TableColumn("spec", numeric=False),
        TableColumn("ranks"),
        TableColumn("seeds"),
        TableColumn(task.metric.axis),
        TableColumn("95 % interval"),
        *versus,
        TableColumn("payload ratio"),
        TableColumn("wire ratio"),
        TableColumn("sent by a rank"),
        TableColumn("wall time"),
        *skipped,
    ]


def against(task: Task) -> str:
    """Whom the groups of a task are measured against, in words."""
    baselines = task.baselines
    return baselines[0].label if len(baselines) == 1 else "the dense twin"


def cells(task: Task, group: Group) -> list[TableCell]:
    """One line, in the order of the columns."""
    told, metric = group.estimate, task.metric
    return [
        TableCell(group.label if group.ended else f"{group.label} ({_standing(group)})"),
        TableCell(ranks(group.runs[0]), group.runs[0].world),
        TableCell(str(len(group.runs)), len(group.runs)),
        _known(told.mean, _outcome(group) or mean_and_spread(told)),
        _known(told.half_width, ends(told, metric.least, metric.most)),
        *([_lead(task, group)] if _compares(task) else []),
        _measured(group.mean("payload_ratio"), ratio),
        _measured(group.wire_ratio, ratio),
        _measured(group.mean("sent"), in_bytes),
        _measured(group.mean("seconds"), in_seconds),
        *([_skipped(group)] if _skips(task) else []),
    ]


def ranks(run: RunRecord) -> str:
    """How many, and whether they were played by one process."""
    return f"{run.ranks} virtual" if run.start.get("virtual") else run.ranks


def _standing(group: Group) -> str:
    """How far the run that is furthest from its end has come."""
    behind = min((run for run in group.runs if not run.final), key=lambda run: float(run.last.get("step", 0)))
    steps, whole = float(behind.start.get("steps_per_epoch", 0)), float(behind.start.get("steps", 0))
    return f"unfinished: epoch {behind.last['epoch']:g} of {whole / steps:g}" if steps else "unfinished"


def _compares(task: Task) -> bool:
    return task.baseline is not None and len(task.groups) > 1


def _skips(task: Task) -> bool:
    return any(group.skipped[0] for group in task.groups)


def _skipped(group: Group) -> TableCell:
    skipped, steps = group.skipped
    return TableCell(f"{skipped:,} of {steps:,}" if skipped else "0", skipped / max(1, steps))


def _outcome(group: Group) -> str:
    """That a metric means nothing, where it does: what diverged is no result."""
    if not group.diverged:
        return ""
    return "diverged" if group.diverged == len(group.runs) else f"{group.diverged} of {len(group.runs)} diverged"


def _lead(task: Task, group: Group) -> TableCell:
    versus, baseline = task.difference(group), task.baseline_of(group)
    if versus is None or baseline is None:
        return TableCell("", "")
    if math.isnan(versus.mean):
        return TableCell("diverged" if group.diverged else "the twin diverged", "")
    return TableCell(difference(versus, task.metric.most - task.metric.least), rounded(versus.mean))


def _known(number: float | None, text: str) -> TableCell:
    sorted_by = rounded(number)
    return TableCell(text, "" if sorted_by is None else sorted_by)


def _measured(number: float | None, write: Callable[[float], str]) -> TableCell:
    return TableCell("", "") if number is None else TableCell(write(number), number)
