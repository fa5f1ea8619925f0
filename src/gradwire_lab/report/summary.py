"""The table of a task: a line for each group, a column for each thing worth comparing."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from gradwire_lab.report.load import RunRecord
from gradwire_lab.report.numbers import difference, ends, in_bytes, in_seconds, mean_and_spread, ratio, rounded
from gradwire_lab.report.run_groups import Group, Task
from gradwire_lab.report.statistics import ALIKE, Estimate

# What two columns are. `report()` of a handle has a wire ratio of sent bytes alone.
RATIOS = (
    "Payload ratio: float32 gradient bytes / bytes a rank encodes. Wire ratio: bytes a rank sends and receives in a "
    "float32 ring all-reduce / in ours."
)
_FEWEST_SEEDS = 3  # the interval of two is so wide that nearly every loss lies inside it
_FAR = 5  # times as wide: such an interval hides losses that a narrower one would show


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
    """The smallest messages without a loss that the seeds show, in words; empty where no spec has enough seeds.

    Of specs that send the same number of bytes it names the best; where these are equal, too, all of them. Specs that
    send less, but whose intervals are too wide to show a loss, come first, as such.
    """
    known = _known_leads(task)
    ranked = _unharmed(task, known)
    if not known:
        return ""
    if not ranked:
        alike = sum(_fewer(task, group) <= 1 for group in task.groups) > len(task.baselines)
        return f"Every spec{' that sends fewer bytes' * alike} loses against {against(task)}."
    told = [pair for pair in ranked if not _vague(task, pair, known)]
    unclear = ranked[: ranked.index(told[0])] if told else ranked
    words = [f"{group.label}: too few seeds to tell ({difference(lead)})." for group, lead in unclear]
    return " ".join([*words, *([_best(task, told)] if told else [])])


def best(task: Task) -> Group | None:
    """The spec that the headline names as the one to take."""
    known = _known_leads(task)
    return next((pair[0] for pair in _unharmed(task, known) if not _vague(task, pair, known)), None)


def _known_leads(task: Task) -> list[tuple[Group, Estimate]]:
    """Of every spec with enough seeds that sends less than its baseline, the difference to that."""
    smaller = [group for group in task.groups if _fewer(task, group) > 1]
    leads = [(group, lead) for group in smaller if (lead := task.difference(group)) is not None]
    return [(group, lead) for group, lead in leads if lead.n >= _FEWEST_SEEDS and _comparable(task, group)]


def _unharmed(task: Task, known: list[tuple[Group, Estimate]]) -> list[tuple[Group, Estimate]]:
    """Those that show no loss, the smallest messages first, and of equal ones the best."""
    sign = -1 if task.metric.larger_is_better else 1
    kept = [(group, lead) for group, lead in known if not _loses(task, lead)]
    return sorted(kept, key=lambda pair: (_sent(pair[0]), sign * pair[1].mean, pair[0].label))


def _best(task: Task, ranked: list[tuple[Group, Estimate]]) -> str:
    group, lead = ranked[0]
    same = [other.label for other, its in ranked if _sent(other) == _sent(group) and abs(its.mean - lead.mean) < ALIKE]
    return f"{_listed(same)}: {_outcome(lead)}, {ratio(_fewer(task, group)).removesuffix('x')} times fewer bytes."


def _vague(task: Task, pair: tuple[Group, Estimate], known: list[tuple[Group, Estimate]]) -> bool:
    """Whether an interval is wider than the baseline's own, though another spec's is far narrower.

    Where no other spec shows how narrow intervals can be, it must be far wider than the baseline's own.
    """
    group, lead = pair
    baseline, width = task.baseline_of(group), lead.half_width or 0.0
    own = baseline.estimate.half_width if baseline else None
    clearer = any(width > _FAR * (other.half_width or 0.0) for one, other in known if one is not group)
    return clearer if own is None else width > (own if clearer else _FAR * own)


def _sent(group: Group) -> float:
    return group.mean("sent") or math.inf


def _comparable(task: Task, group: Group) -> bool:
    baseline = task.baseline_of(group)
    return baseline is not None and not baseline.diverged


def _listed(names: list[str]) -> str:
    """Names as in a sentence; semicolons part specs, because some hold commas."""
    return " and ".join(filter(None, ("; ".join(names[:-1]), names[-1])))


def _outcome(lead: Estimate) -> str:
    """Where all seeds differ by the same amount, there is no interval."""
    if lead.low is None and abs(lead.mean) < ALIKE:
        return f"equal to the baseline with each of {lead.n} seeds"
    if lead.low is None:
        return f"better by the same amount with each of {lead.n} seeds ({difference(lead)})"
    return f"no significant loss over {lead.n} seeds ({difference(lead)})"


def _fewer(task: Task, group: Group) -> float:
    """How many times fewer bytes a rank sends than with the baseline."""
    baseline, sent = task.baseline_of(group), group.mean("sent")
    return (baseline.mean("sent") or 0.0) / sent if baseline and sent else 0.0


def _loses(task: Task, lead: Estimate) -> bool:
    """Whether it diverged, or the whole interval of a difference lies on the worse side; without one, the seeds."""
    if math.isnan(lead.mean):
        return True
    low, high = (lead.mean, lead.mean) if lead.low is None or lead.high is None else (lead.low, lead.high)
    return high < -ALIKE if task.metric.larger_is_better else low > ALIKE


def ranks(run: RunRecord) -> str:
    """How many, and whether one process simulated them."""
    simulated = run.start.get("simulated", run.start.get("virtual"))  # earlier logs call it virtual
    return f"{run.ranks} simulated" if simulated else run.ranks


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
