"""Runs that differ only in their seed, side by side with the other ways of doing the same task."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gradwire.report.load import DENSE, Metric, Run
from gradwire.report.statistics import Estimate, estimate, paired


@dataclass(frozen=True)
class Group:
    """The runs of one way of doing a task, one for each seed."""

    label: str
    runs: tuple[Run, ...]

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
        """The metric of each seed, after the last epoch."""
        return {run.seed: run.value(run.last) for run in self.runs}

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
        name: What is learned by what.
        metric: What it is judged by.
        groups: The ways.
        twin: The one that the others are measured against: as a rule the dense one.
    """

    name: str
    metric: Metric
    groups: tuple[Group, ...]
    twin: Group | None = None

    def difference(self, group: Group) -> Estimate | None:
        """What a group loses or gains against the twin, seed by seed; nothing is known before both have ended."""
        if self.twin is None or group is self.twin or not (group.ended and self.twin.ended):
            return None
        return paired(group.values, self.twin.values)


def tasks(runs: Iterable[Run]) -> list[Task]:
    """Sort runs into tasks, and those into groups; dense first, then by bytes sent. Runs without a record are left out.

    Runs of the same model on the same data make a task; those whose folders' names differ only in the seed, a group.
    """
    shelves: dict[tuple[str, int], list[Run]] = {}
    for run in runs:
        if run.last:
            shelves.setdefault((task_name(run), int(run.start.get("parameters", 0))), []).append(run)
    names = [name for name, _ in shelves]
    return [
        _task(name if names.count(name) == 1 else f"{name}, {size:,} parameters", shelves[name, size])
        for name, size in sorted(shelves)
    ]


def task_name(run: Run) -> str:
    """What was learned by what."""
    parts = [str(run.recipe.get(table, {}).get("name", "")) for table in ("data", "model")]
    return ", ".join(part for part in parts if part) or run.name


def front(points: Sequence[tuple[float, float]], metric: Metric) -> list[int]:
    """Which (cost, value) nobody beats at the same or a lower cost, cheapest first."""
    best: list[int] = []
    by_cost = sorted(range(len(points)), key=lambda i: (points[i][0], -points[i][1] * _sign(metric)))
    for i in by_cost:
        if not best or metric.better(points[i][1], points[best[-1]][1]):
            best.append(i)
    return best


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _sign(metric: Metric) -> int:
    return 1 if metric.larger_is_better else -1


def _task(name: str, runs: list[Run]) -> Task:
    groups = _groups(runs)
    return Task(name, runs[0].metric, groups, next((group for group in groups if group.dense), None))


def _groups(runs: list[Run]) -> tuple[Group, ...]:
    shelves: dict[tuple[str, str], list[Run]] = {}
    for run in runs:
        shelves.setdefault((str(run.folder.parent), run.stem), []).append(run)
    inside = list(shelves.values())
    made = [Group(_label(group[0], inside), tuple(sorted(group, key=lambda run: run.seed))) for group in inside]
    return tuple(sorted(made, key=lambda group: (not group.dense, -(group.mean("sent") or 0))))


def _label(run: Run, shelves: list[list[Run]]) -> str:
    """The spec, and as many settings as tell this group from others of the same spec."""
    rivals = [shelf[0] for shelf in shelves if shelf[0].spec == run.spec]
    if len(rivals) == 1:
        return run.spec
    mine = _settings(run)
    theirs = [_settings(rival) for rival in rivals]
    apart = {key: value for key, value in mine.items() if any(other.get(key) != value for other in theirs)}
    if sum(all(other.get(key) == value for key, value in apart.items()) for other in theirs) == 1:
        words = [f"{key.rpartition('.')[2]} {value}" for key, value in apart.items()]
        return ", ".join((run.spec, *words))
    stems = [rival.stem for rival in rivals]
    return f"{run.spec}, {run.stem if stems.count(run.stem) == 1 else run.folder.parent / run.stem}"


def _settings(run: Run) -> dict[str, object]:
    """What the recipe decides, less what differs between seeds or machines."""
    tables = {name: table for name, table in run.recipe.items() if isinstance(table, dict)}
    flat = {f"{name}.{key}": value for name, table in tables.items() for key, value in table.items()}
    return {key: value for key, value in flat.items() if key not in ("train.seed", "train.workers", "data.root")} | {
        "ranks": run.world
    }
