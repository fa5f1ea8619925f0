"""Runs that differ only in their seed, side by side with the other ways of doing the same task."""

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from gradwire_lab.report.load import DENSE, Metric, RunRecord
from gradwire_lab.report.statistics import Estimate, estimate, paired
from gradwire_lab.report.versions import by_version, fingerprint, spec_files

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)

_ASIDE = ("train.seed", "train.workers", "train.eval_every", "train.log_every", "train.save_every", "data.root")
_HOW = ("sync.", "gossip.", "local.")  # tables that say how workers agree, which is what is compared
_USUAL: dict[str, object] = {"sync.granularity": "layer", "sync.ramp": 0}


@dataclass(frozen=True)
class Group:
    """The runs of one way of doing a task, one for each seed."""

    label: str
    runs: tuple[RunRecord, ...]

    @property
    def spec(self) -> str:
        return self.runs[0].spec

    @property
    def dense(self) -> bool:
        return self.spec in DENSE

    @property
    def ended(self) -> bool:
        return all(run.final for run in self.runs)

    @property
    def values(self) -> dict[int, float]:
        """The metric of each seed, after the last epoch; not a number where it diverged."""
        return {run.seed: math.nan if run.diverged else run.value(run.last) for run in self.runs}

    @property
    def diverged(self) -> int:
        """How many of its runs did."""
        return sum(run.diverged for run in self.runs)

    @property
    def skipped(self) -> tuple[int, int]:
        """Steps that were skipped because gradients were not finite, and all steps."""
        skipped, steps = (sum(int(run.number(key) or 0) for run in self.runs) for key in ("skipped", "step"))
        return skipped, steps

    @property
    def estimate(self) -> Estimate:
        return estimate(list(self.values.values()))

    def mean(self, key: str) -> float | None:
        """The mean of a number over the runs that noted it."""
        return _mean(run.number(key) for run in self.runs)

    @property
    def wire_ratio(self) -> float | None:
        return _mean(run.wire_ratio for run in self.runs)


@dataclass(frozen=True)
class Task:
    """One task, done in several ways: what may be compared with each other.

    Attributes:
        name: What is learned by what; of an earlier version of the user's files, with the version.
        metric: What it is judged by.
        groups: The ways.
        baseline: The first of those that the others are measured against: as a rule the dense one.
        version: A short hash of the user's own files that all its runs depend on; empty where there are none.
        versions: How many versions of the files there are runs of.
        latest: Whether this version was trained last.
    """

    name: str
    metric: Metric
    groups: tuple[Group, ...]
    baseline: Group | None = None
    version: str = ""
    versions: int = 1
    latest: bool = True

    @property
    def title(self) -> str:
        """The name, with the version of the user's files where there are several."""
        if self.versions == 1:
            return self.name
        return f"{self.name}, version {self.version}, the latest of {self.versions}" if self.latest else self.name

    @property
    def baselines(self) -> list[Group]:
        """The ways that others may be measured against: all that are dense, if the baseline is; else the baseline."""
        if self.baseline is None or not self.baseline.dense:
            return [self.baseline] if self.baseline else []
        return [group for group in self.groups if group.dense]

    def baseline_of(self, group: Group) -> Group | None:
        """Whom a group is measured against: the dense training that differs from it in the fewest settings."""
        baselines = self.baselines
        if group in baselines:
            return None
        return min(baselines, key=lambda baseline: len(_differences(group.runs[0], baseline.runs[0])), default=None)

    def difference(self, group: Group) -> Estimate | None:
        """What a group loses or gains against its baseline, seed by seed; nothing is known before both have ended."""
        baseline = self.baseline_of(group)
        if baseline is None or not (group.ended and baseline.ended):
            return None
        return paired(group.values, baseline.values)


def tasks(runs: Iterable[RunRecord]) -> list[Task]:
    """Sort runs into tasks, and those into groups; dense first, then by bytes sent. Runs without a record are left out.

    Runs of the same model on the same data make a task; those whose folders' names differ only in the seed, a group.
    Where a file of the user's own has changed, each version is a task of its own, the latest first.
    """
    by_name = grouped((run for run in runs if run.last), task_name)
    return [task for name in sorted(by_name) for task in _versions(name, by_name[name])]


def _versions(name: str, runs: list[RunRecord]) -> Iterable[Task]:
    found = by_version(runs)
    for number, (version, inside) in enumerate(found.items()):
        title = f"{name}, earlier version {version}" if number else name
        by_size = grouped(inside, lambda run: int(run.start.get("parameters", 0)))
        for size in sorted(by_size):
            full = title if len(by_size) == 1 else f"{title}, {size:,} parameters"
            yield replace(_task(full, by_size[size]), version=version, versions=len(found), latest=not number)


def grouped(values: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Values by key, in the order in which they came."""
    groups: dict[K, list[T]] = {}
    for value in values:
        groups.setdefault(key(value), []).append(value)
    return groups


def task_name(run: RunRecord) -> str:
    """What was learned by what."""
    parts = [str(run.recipe.get(table, {}).get("name", "")) for table in ("data", "model")]
    return ", ".join(part for part in parts if part) or run.name


def front(points: Sequence[tuple[float, Estimate]], metric: Metric) -> list[int]:
    """The Pareto front of some (cost, value), cheapest first: each next one is better by more than the intervals.

    What has no interval, as of a single seed, is not on it.
    """
    best: list[int] = []
    sign = 1 if metric.larger_is_better else -1
    known = [i for i, (_, value) in enumerate(points) if value.low is not None]
    for i in sorted(known, key=lambda i: (points[i][0], -sign * points[i][1].mean)):
        if not best or _separate(points[i][1], points[best[-1]][1], metric):
            best.append(i)
    return best


def _separate(one: Estimate, other: Estimate, metric: Metric) -> bool:
    """Whether one is better, and their intervals do not overlap."""
    better, worse = (one, other) if metric.larger_is_better else (other, one)
    assert better.low is not None and worse.high is not None
    return better.low > worse.high


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _task(name: str, runs: list[RunRecord]) -> Task:
    groups = _groups(runs)
    return Task(name, runs[0].metric, groups, next((group for group in groups if group.dense), None))


def _groups(runs: list[RunRecord]) -> tuple[Group, ...]:
    inside = list(grouped(runs, lambda run: (str(run.folder.parent), _way(run), spec_files(run))).values())
    made = [Group(_label(group[0], inside), tuple(sorted(group, key=lambda run: run.seed))) for group in inside]
    return tuple(sorted(made, key=lambda group: (not group.dense, -(group.mean("sent") or 0))))


def _way(run: RunRecord) -> str:
    """The folder's name without the seed, nor the hash that it has where an earlier version had the name first."""
    return run.stem.removesuffix(f"-{fingerprint(run.asked_files)}") if run.asked_files else run.stem


def _label(run: RunRecord, by_key: list[list[RunRecord]]) -> str:
    """The spec, what of the exchange is unusual, and what else differs from the baseline and from similar groups."""
    rivals = [runs[0] for runs in by_key if runs[0].spec == run.spec]
    dense = [] if run.spec in DENSE else [runs[0] for runs in by_key if runs[0].spec in DENSE]
    unlike = min((_differences(run, baseline) for baseline in dense), key=len, default=())
    mine = _settings(run)
    theirs = [_settings(rival) for rival in rivals]
    usual = {} if run.spec in DENSE else _USUAL
    apart = {
        key: value
        for key, value in mine.items()
        if key in unlike or value != usual.get(key, value) or any(other.get(key, value) != value for other in theirs)
    }
    words = list(dict.fromkeys(f"{key.rpartition('.')[2]} {_plain(value)}" for key, value in apart.items()))
    if sum(all(other.get(key, value) == value for key, value in apart.items()) for other in theirs) > 1:
        stems = [rival.stem for rival in rivals]
        words.append(run.stem if stems.count(run.stem) == 1 else str(run.folder.parent / run.stem))
    return ", ".join((run.spec, *words))


def _plain(value: object) -> object:
    return f"{value:g}" if isinstance(value, float) else value


def _differences(run: RunRecord, baseline: RunRecord) -> list[str]:
    """Which settings differ, those of the exchange left aside."""
    mine, theirs = _settings(run), _settings(baseline)
    return [key for key in mine if mine[key] != theirs.get(key, mine[key]) and not key.startswith(_HOW)]


def _settings(run: RunRecord) -> dict[str, object]:
    """What the recipe decides, less what differs between seeds or machines, and how often it was evaluated or saved."""
    tables = {name: table for name, table in run.recipe.items() if isinstance(table, dict)}
    flat = {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}
    return {key: value for key, value in flat.items() if key not in _ASIDE} | {"ranks": run.ranks}
