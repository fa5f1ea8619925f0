"""The table of a task: a line for each group, a column for each thing worth comparing."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gradwire_lab.report.load import RunRecord
from gradwire_lab.report.numbers import difference, ends, in_bytes, in_seconds, mean_and_spread, ratio, rounded
from gradwire_lab.report.run_groups import Group, Task
from gradwire_lab.report.statistics import Estimate

_FEWEST_SEEDS = 3  # the interval of two is so wide that nearly every loss lies inside it


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
    return [TableColumn(title, numeric=title != "spec") for title in _readers(task)]


def cells(task: Task, group: Group) -> list[TableCell]:
    """One line, in the order of the columns."""
    return [read(group) for read in _readers(task).values()]


def _readers(task: Task) -> dict[str, Callable[[Group], TableCell]]:
    """By the title of a column: the cell of a group."""
    readers: dict[str, Callable[[Group], TableCell]] = {
        "spec": lambda group: TableCell(group.label if group.ended else f"{group.label} ({_progress(group)})"),
        "ranks": lambda group: TableCell(ranks(group.runs[0]), group.runs[0].world),
        "seeds": lambda group: TableCell(str(len(group.runs)), len(group.runs)),
        task.metric.axis: lambda group: _known(
            group.estimate.mean, _divergence(group) or mean_and_spread(group.estimate)
        ),
        "95 % interval": lambda group: _known(
            group.estimate.half_width, ends(group.estimate, task.metric.least, task.metric.most)
        ),
    }
    if task.baseline is not None and len(task.groups) > 1:
        readers[f"against {against(task)}"] = lambda group: _lead(task, group)
    readers |= {
        "payload ratio": lambda group: _measured(group.mean("payload_ratio"), ratio),
        "wire ratio": lambda group: _measured(group.wire_ratio, ratio),
        "sent by a rank": lambda group: _measured(group.mean("sent"), in_bytes),
        "wall time": lambda group: _measured(group.mean("seconds"), in_seconds),
    }
    if any(group.skipped[0] for group in task.groups):
        readers["skipped steps"] = _skipped
    return readers


def against(task: Task) -> str:
    """The baseline of a task's groups, in words."""
    baselines = task.baselines
    return baselines[0].label if len(baselines) == 1 else "the dense baseline"


def headline(task: Task) -> str:
    """The smallest messages without a loss that the seeds show, in words; empty where no spec has enough seeds."""
    leads = [(group, task.difference(group)) for group in task.groups]
    known = [(group, lead) for group, lead in leads if lead and lead.low is not None and lead.n >= _FEWEST_SEEDS]
    unharmed = [(group, lead) for group, lead in known if not _loses(task, lead)]
    if not known:
        return ""
    if not unharmed:
        return f"Every spec loses against {against(task)}."
    group, lead = min(unharmed, key=lambda pair: pair[0].mean("sent") or math.inf)
    baseline, sent = task.baseline_of(group), group.mean("sent")
    fewer = (baseline.mean("sent") or 0.0) / sent if baseline and sent else 0.0
    bytes_sent = f", {ratio(fewer).removesuffix('x')} times fewer bytes" if fewer > 1 else ""
    return f"{group.label}: no significant loss over {lead.n} seeds ({difference(lead)}){bytes_sent}."


def _loses(task: Task, lead: Estimate) -> bool:
    """Whether the whole interval of a difference lies on the worse side."""
    assert lead.low is not None and lead.high is not None
    return lead.high < 0 if task.metric.larger_is_better else lead.low > 0


def ranks(run: RunRecord) -> str:
    """How many, and whether one process simulated them."""
    return f"{run.ranks} virtual" if run.start.get("virtual") else run.ranks


def _progress(group: Group) -> str:
    """How far the run that is furthest from its end has come."""
    behind = min((run for run in group.runs if not run.final), key=lambda run: float(run.last.get("step", 0)))
    steps, whole = float(behind.start.get("steps_per_epoch", 0)), float(behind.start.get("steps", 0))
    return f"unfinished: epoch {behind.last['epoch']:g} of {whole / steps:g}" if steps else "unfinished"


def _skipped(group: Group) -> TableCell:
    skipped, steps = group.skipped
    return TableCell(f"{skipped:,} of {steps:,}" if skipped else "0", skipped / max(1, steps))


def _divergence(group: Group) -> str:
    """That a metric means nothing, where it does: what diverged is no result."""
    if not group.diverged:
        return ""
    return "diverged" if group.diverged == len(group.runs) else f"{group.diverged} of {len(group.runs)} diverged"


def _lead(task: Task, group: Group) -> TableCell:
    versus, baseline = task.difference(group), task.baseline_of(group)
    if versus is None or baseline is None:
        return TableCell("", "")
    if math.isnan(versus.mean):
        return TableCell("diverged" if group.diverged else "the baseline diverged", "")
    return TableCell(difference(versus, task.metric.most - task.metric.least), rounded(versus.mean))


def _known(number: float | None, text: str) -> TableCell:
    sorted_by = rounded(number)
    return TableCell(text, "" if sorted_by is None else sorted_by)


def _measured(number: float | None, write: Callable[[float], str]) -> TableCell:
    return TableCell("", "") if number is None else TableCell(write(number), number)
