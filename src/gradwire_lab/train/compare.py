"""A grid of specs and seeds: run what is missing, then compare each spec with the first.

Each cell of the grid is a run folder. One that has its closing record is never run again; one that was interrupted
resumes from its checkpoint; and what is left when the time is up waits for the next command.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from threading import Event
from typing import Any, Protocol

from gradwire_lab.report.load import CELL, finished, load
from gradwire_lab.report.run_groups import Group, Task, task_name
from gradwire_lab.report.slug import run_title, slug
from gradwire_lab.report.versions import fingerprint
from gradwire_lab.train.grid_time import GridTime
from gradwire_lab.train.run_folder import begun
from gradwire_lab.train.spec_lists import split_specs


class CellFailed(Exception):
    """Raised where the first cell of a grid fails before it has a result: the others probably would, too."""


class OutOfTime(Exception):
    """Raised by a runner that stopped a cell because the time was up; its checkpoint is in the folder."""


class RunCell(Protocol):
    """Train one cell to its end, from its checkpoint where there is one."""

    def __call__(self, recipes: tuple[str, ...], overrides: tuple[str, ...], folder: Path) -> None: ...

    def stop(self) -> None:
        """End in order whatever is running."""


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
    """One run of the grid; ``files`` are hashes of the user's own files that it depends on."""

    arm: Arm
    seed: int
    recipes: tuple[str, ...]
    overrides: tuple[str, ...]
    folder: Path
    files: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return f"{self.arm.label}, seed {self.seed}"

    @property
    def asked(self) -> dict[str, object]:
        return {"recipes": list(self.recipes), "overrides": list(self.overrides), "files": dict(self.files)}


@dataclass
class Progress:
    """What became of the cells."""

    skipped: list[GridCell] = field(default_factory=list)
    ran: list[GridCell] = field(default_factory=list)
    failed: list[tuple[GridCell, str]] = field(default_factory=list)
    left: list[GridCell] = field(default_factory=list)


def arms(text: str) -> tuple[Arm, ...]:
    """Read ``"fp32; int4; exchange=two_way; topk(0.01) @ optimizer.lr=0.02"``.

    Semicolons separate specs, and a spec from keys of ``[sync]``. An @ stands before any other key.

    Raises:
        ValueError: There is no spec, or one twice.
    """
    parsed = []
    for part in split_specs(text):
        spec, *rest = re.split("([;@])", part)
        settings = ("sync." * (mark == ";") + key.strip() for mark, key in zip(rest[::2], rest[1::2], strict=True))
        parsed.append(Arm(spec.strip(), tuple(settings)))
    if not parsed:
        raise ValueError("there is no spec to compare; write for example --specs 'fp32; topk(0.01)|sign'")
    by_folder: dict[str, Arm] = {}
    for arm in parsed:
        other = by_folder.setdefault(slug(arm.label), arm)
        if other is not arm:
            raise ValueError(f"{arm.label!r} and {other.label!r} would share a run folder; drop one")
    return tuple(parsed)


def grid(
    recipes: Sequence[str],
    arms: Iterable[Arm],
    seeds: Iterable[int],
    overrides: Sequence[str] = (),
    runs: Path = Path("runs"),
    suffix: str = "",
    files: Mapping[Arm, Mapping[str, str]] | None = None,
    name: str = "",
) -> list[GridCell]:
    """The cells, seed by seed: so each spec has a baseline of the same seed, also if the time is up early.

    ``files`` are hashes of the user's own files that an arm depends on. Where a folder holds a run of other files, the
    cell's folder has their hash in its name, so both runs are kept. ``name`` opens the names of folders; by default
    that of the recipes.
    """
    arms, cells = tuple(arms), []
    for seed, arm in product(seeds, arms):
        own = dict((files or {}).get(arm, {}))
        words = name or run_title(recipes), slug(suffix), slug(arm.label)
        folder = runs / "-".join(filter(None, (*words, str(seed))))
        if began(folder) and json.loads((folder / CELL).read_text()).get("files", {}) != own:
            folder = runs / "-".join(filter(None, (*words, fingerprint(own), str(seed))))
        settings = (*overrides, f"sync.spec={arm.spec}", *arm.overrides, f"train.seed={seed}")
        cells.append(GridCell(arm, seed, tuple(recipes), settings, folder, own))
    return cells


def began(folder: Path) -> bool:
    """Whether a cell's training has got anywhere. What fails before its first record leaves its folder to others."""
    return (folder / CELL).is_file() and begun(folder)


def run_grid(
    cells: Sequence[GridCell],
    run_cell: RunCell,
    budget_seconds: float | None = None,
    command: str = "",
    log: Callable[[str], None] = print,
    clock: Callable[[], float] = time.monotonic,
    jobs: int = 1,
) -> Progress:
    """Run every cell that is not finished, ``jobs`` at once, until all are or the time is up.

    A cell that fails is logged and left behind; the others are trained, unless it is the first and has no result. Each
    cell's folder notes what was asked of it, so that no later grid mistakes it for another, and the command, which
    tables name as their source.

    Raises:
        ValueError: A folder holds a run that was asked for otherwise, or the recipe is refused.
        CellFailed: The first cell failed before it had any result.
    """
    for cell in cells:
        _check(cell)
    end = None if budget_seconds is None else clock() + budget_seconds
    progress, halted, left = Progress(), Event(), GridTime((cell.arm for cell in cells), jobs)

    def take(number: int, cell: GridCell) -> None:
        place = f"[{number}/{len(cells)}] {cell.name}"
        if finished(cell.folder):
            progress.skipped.append(cell)
            left.skip(cell.arm)
            log(f"{place}: finished before")
        elif halted.is_set() or progress.left or (end is not None and clock() >= end):
            progress.left.append(cell)
        else:
            resumed, since = began(cell.folder), time.monotonic()
            verb = "continues" if resumed else "starts"
            trained = {other.arm for other in (*progress.skipped, *progress.ran)}
            log(
                ", ".join(filter(None, (f"{place}: {verb}", _estimate(left, all(one.arm in trained for one in cells)))))
            )
            cell.folder.mkdir(parents=True, exist_ok=True)
            (cell.folder / CELL).write_text(json.dumps(cell.asked | {"command": command}, indent=2) + "\n")
            try:
                _run(cell, run_cell, progress, log, halted)
                _note_time(left, cell, time.monotonic() - since, resumed)
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


def _note_time(left: GridTime, cell: GridCell, seconds: float, resumed: bool) -> None:
    """A training that failed, or that had begun before this command, does not tell what others will take."""
    final = load(cell.folder).final if finished(cell.folder) and not resumed else None
    if final is None:
        left.skip(cell.arm)
    else:
        left.finish(cell.arm, min(float(final["seconds"]), seconds), seconds)


def _estimate(left: GridTime, compiled: bool) -> str:
    """The time that is left; the first training with a spec may take longer than others did."""
    more = "" if compiled else "; where kernels are compiled for the first time, up to a minute more for a spec"
    return left.text and f"{left.text} in all{more}"


def _run(cell: GridCell, run_cell: RunCell, progress: Progress, log: Callable[[str], None], halted: Event) -> None:
    try:
        run_cell(cell.recipes, cell.overrides, cell.folder)
    except OutOfTime:
        progress.left.append(cell)
    except (RuntimeError, OSError) as error:
        if halted.is_set():  # it was stopped, as all were
            progress.left.append(cell)
            return
        if not (progress.ran or progress.skipped or began(cell.folder)):
            raise CellFailed(f"{cell.name} failed before its first result: {error}") from None
        progress.failed.append((cell, str(error)))
        log(f"{cell.name} failed: {error}")
    else:
        progress.ran.append(cell)


def _check(cell: GridCell) -> None:
    if not began(cell.folder):
        return
    asked = {"files": {}, **json.loads((cell.folder / CELL).read_text())}
    if any(asked[key] != value for key, value in cell.asked.items()):
        changed = "; ".join(_changes(asked, cell.asked))
        raise ValueError(
            f"{cell.folder} was made by other settings: {changed}. Give --suffix NAME to train apart and keep both"
        )


def _changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """``train.epochs=4, now 9`` for each setting that differs between what was asked before and what is asked now."""
    was, now = _settings(old), _settings(new)
    keys = [key for key in dict.fromkeys((*was, *now)) if was.get(key) != now.get(key)]
    changes = [f"{key}={was[key]}, now {now.get(key, 'not set')}" for key in keys if key in was]
    changes += [f"{key} not set, now {now[key]}" for key in keys if key not in was]
    return changes or ["the same keys in another order"]


def _settings(asked: Mapping[str, Any]) -> dict[str, str]:
    settings = (override.partition("=")[::2] for override in asked["overrides"])
    files = ((f"hash of {name}", value) for name, value in asked["files"].items())
    return {"recipe": " ".join(asked["recipes"]), **dict(settings), **dict(files)}


def outcome(cells: Sequence[GridCell]) -> Task | None:
    """The results of the finished cells, in the order of the specs; the baseline is the first. None before any is."""
    ended = [cell for cell in cells if finished(cell.folder)]
    groups = {
        arm: Group(arm.label, tuple(load(cell.folder) for cell in ended if cell.arm == arm))
        for arm in dict.fromkeys(cell.arm for cell in cells)
    }
    trained = [group for group in groups.values() if group.runs]
    if not trained:
        return None
    some, first = trained[0].runs[0], groups[cells[0].arm]
    return Task(task_name(some), some.metric, tuple(trained), first if first.runs else None)
