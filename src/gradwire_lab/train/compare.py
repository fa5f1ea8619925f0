"""A grid of specs and seeds: run what is missing, then say what each spec costs against the first.

Each cell of the grid is a run folder. One that has its closing record is never run again; one that was interrupted
goes on from its checkpoint; and what is left when the time is up waits for the next command.
"""

import json
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Protocol

from gradwire_lab.report.load import CELL, finished, load
from gradwire_lab.report.run_groups import Group, Task, task_name
from gradwire_lab.report.slug import slug


class OutOfTime(Exception):
    """Raised by a runner that stopped a cell because the time was up; its checkpoint is in the folder."""


class RunCell(Protocol):
    """Train one cell to its end, from its checkpoint where there is one."""

    def __call__(self, recipes: tuple[str, ...], overrides: tuple[str, ...], folder: Path) -> None: ...

    def stop(self) -> None:
        """End whatever is running, in order: somebody wants to leave."""


@dataclass(frozen=True)
class Arm:
    """One way of doing the task: a spec, and settings that only it has."""

    spec: str
    overrides: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        return " @ ".join((self.spec, *self.overrides))


@dataclass(frozen=True)
class GridCell:
    """One run of the grid."""

    arm: Arm
    seed: int
    recipes: tuple[str, ...]
    overrides: tuple[str, ...]
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.arm.label}, seed {self.seed}"

    @property
    def asked(self) -> dict[str, list[str]]:
        return {"recipes": list(self.recipes), "overrides": list(self.overrides)}


@dataclass
class Progress:
    """What became of the cells."""

    skipped: list[GridCell] = field(default_factory=list)
    ran: list[GridCell] = field(default_factory=list)
    failed: list[tuple[GridCell, str]] = field(default_factory=list)
    left: list[GridCell] = field(default_factory=list)


def arms(text: str) -> tuple[Arm, ...]:
    """Read ``"fp32; topk(0.01) @ sync.granularity=model"``: specs parted by semicolons, settings set off by @.

    Raises:
        ValueError: There is no spec, or one twice.
    """
    made = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        spec, *overrides = (piece.strip() for piece in part.split("@"))
        made.append(Arm(spec, tuple(overrides)))
    if not made:
        raise ValueError("there is no spec to compare; write for example --specs 'fp32; topk(0.01)|sign'")
    by_folder: dict[str, Arm] = {}
    for arm in made:
        other = by_folder.setdefault(slug(arm.label), arm)
        if other is not arm:
            raise ValueError(f"{arm.label!r} and {other.label!r} would share a run folder; drop one or write it apart")
    return tuple(made)


def title(recipes: Sequence[str]) -> str:
    """What runs of these are called, as `gradwire train` calls them."""
    return "+".join(Path(name).stem if name.endswith(".toml") else name for name in recipes)


def grid(
    recipes: Sequence[str],
    arms: Iterable[Arm],
    seeds: Iterable[int],
    overrides: Sequence[str] = (),
    runs: Path = Path("runs"),
    suffix: str = "",
) -> list[GridCell]:
    """The cells, seed by seed: whatever the time allows, each spec then has its twin of the same seed."""
    arms = tuple(arms)
    return [_cell(tuple(recipes), arm, seed, tuple(overrides), runs, suffix) for seed in seeds for arm in arms]


def _cell(
    recipes: tuple[str, ...], arm: Arm, seed: int, overrides: tuple[str, ...], runs: Path, suffix: str
) -> GridCell:
    folder = runs / "-".join(filter(None, (title(recipes), slug(suffix), slug(arm.label), str(seed))))
    whole = (*overrides, f"sync.spec={arm.spec}", *arm.overrides, f"train.seed={seed}")
    return GridCell(arm, seed, recipes, whole, folder)


def run_grid(
    cells: Sequence[GridCell],
    run_cell: RunCell,
    budget_seconds: float | None = None,
    command: str = "",
    tell: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
    jobs: int = 1,
) -> Progress:
    """Run every cell that is not finished, ``jobs`` at once, until all are or the time is up.

    A cell that fails is told of and left behind; the others go on. Each cell's folder notes what was asked of it, so
    that no later grid mistakes it for another, and the command, which tables name as their source.

    Raises:
        ValueError: A folder holds a run that was asked for otherwise, or the recipe is refused.
    """
    for cell in cells:
        _check(cell)
    end = None if budget_seconds is None else clock() + budget_seconds
    progress, halted = Progress(), Event()

    def take(number: int, cell: GridCell) -> None:
        place = f"[{number}/{len(cells)}] {cell.name}"
        if finished(cell.folder):
            progress.skipped.append(cell)
            tell(f"{place}: finished before")
        elif halted.is_set() or progress.left or (end is not None and clock() >= end):
            progress.left.append(cell)
        else:
            tell(f"{place}: {'goes on' if (cell.folder / CELL).is_file() else 'starts'}")
            cell.folder.mkdir(parents=True, exist_ok=True)
            (cell.folder / CELL).write_text(json.dumps(cell.asked | {"command": command}, indent=2) + "\n")
            try:
                _run(cell, run_cell, progress, tell, halted)
            except BaseException:
                halted.set()  # before this thread takes the next
                raise

    with ThreadPoolExecutor(jobs) as pool:
        tasks = [pool.submit(take, number, cell) for number, cell in enumerate(cells, 1)]
        try:
            for task in tasks:
                task.result()
        except BaseException:
            halted.set()
            run_cell.stop()
            raise
    return progress


def _run(cell: GridCell, run_cell: RunCell, progress: Progress, tell: Callable[[str], None], halted: Event) -> None:
    try:
        run_cell(cell.recipes, cell.overrides, cell.folder)
    except OutOfTime:
        progress.left.append(cell)
    except (RuntimeError, OSError) as wrong:
        if halted.is_set():  # it was stopped, as all were
            progress.left.append(cell)
            return
        progress.failed.append((cell, str(wrong)))
        tell(f"{cell.name} failed: {wrong}")
    else:
        progress.ran.append(cell)


def _check(cell: GridCell) -> None:
    note = cell.folder / CELL
    if not note.is_file():
        return
    asked = json.loads(note.read_text())
    if any(asked[key] != value for key, value in cell.asked.items()):
        before = " ".join((*asked["recipes"], *(f"--set {override}" for override in asked["overrides"])))
        raise ValueError(f"{cell.folder} was made by {before!r}; give --suffix or --runs to keep the two apart")


def outcome(cells: Sequence[GridCell]) -> Task | None:
    """What the finished cells say, in the order of the specs; the twin is the first spec. None before any is."""
    shelves: dict[Arm, list[GridCell]] = {}
    for cell in cells:
        shelves.setdefault(cell.arm, [])
        if finished(cell.folder):
            shelves[cell.arm].append(cell)
    groups = {
        arm: Group(arm.label, tuple(load(cell.folder) for cell in inside)) for arm, inside in shelves.items() if inside
    }
    if not groups:
        return None
    some = next(iter(groups.values())).runs[0]
    return Task(task_name(some), some.metric, tuple(groups.values()), groups.get(next(iter(shelves))))
