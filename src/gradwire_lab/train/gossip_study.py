"""Gossip study: a table of decentralized trainings, made by few processes that train one cell after another.

A study is a TOML file: ``recipes``, ``set`` (settings of all cells), and ``[[cell]]`` with a ``name``, its own ``set``
and ``seeds``; for its page (`report.gossip_table`) also ``about``, ``compared`` and ``groups``, and of a cell its
``group`` and the ``published`` figure. Each finished cell is a line of a JSONL file; a cell that has its line is never
trained again, so the same command goes on wherever the last one stopped; but one whose gamma another rule found is.
Small models leave a GPU idle between kernels: several processes share it.
"""

import json
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gradwire.gossip import auto_gamma
from gradwire.gossip.choco import AUTO
from gradwire_lab.train.loading import task_of
from gradwire_lab.train.loop import Training
from gradwire_lab.train.rank_info import simulated_ranks
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.recipe_files import resolve
from gradwire_lab.train.record import environment

KEYS = ("about", "compared", "recipes", "set", "groups", "cell")
CELL_KEYS = ("name", "group", "set", "seeds", "published")


class StudyCell(NamedTuple):
    """One training of a study."""

    name: str
    seed: int
    recipes: tuple[str, ...]
    settings: tuple[str, ...]

    def recipe(self, extra: Sequence[str] = ()) -> Recipe:
        """What it is, with settings that leave the outcome alone, such as where data lie."""
        return resolve(self.recipes, [*self.settings, f"train.seed={self.seed}", *extra])

    @property
    def key(self) -> str:
        return json.dumps([self.name, self.seed, list(self.recipes), list(self.settings)])


@dataclass(frozen=True)
class StudyJob:
    """What a process of a study needs to know."""

    cells: tuple[StudyCell, ...]
    extra: tuple[str, ...]
    device: str
    deadline: float | None  # on the clock of time.time()


def load(path: Path) -> dict[str, Any]:
    """The file of a study, its keys checked.

    Raises:
        ValueError: It is no study.
    """
    try:
        result = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as wrong:
        raise ValueError(f"{path} cannot be read as TOML: {wrong}") from None
    for keys, allowed in ((result, KEYS), *((entry, CELL_KEYS) for entry in result.get("cell", []))):
        for key in keys:
            if key not in allowed:
                raise ValueError(f"{path} has a key {key!r}; known are {', '.join(allowed)}")
    if not result.get("recipes") or not result.get("cell"):
        raise ValueError(f"{path} needs recipes = [...] and at least one [[cell]]")
    return result


def read(path: Path) -> list[StudyCell]:
    """The cells of a study, in order."""
    result = load(path)
    made = [cell for entry in result["cell"] for cell in _cells(entry, tuple(result["recipes"]), result.get("set", []))]
    if len({cell.key for cell in made}) < len(made):
        raise ValueError(f"{path} has a cell twice; give each a name and settings of its own")
    return made


def _cells(entry: dict[str, Any], recipes: tuple[str, ...], common: list[str]) -> Iterator[StudyCell]:
    for seed in entry.get("seeds", [0]):
        yield StudyCell(entry["name"], seed, recipes, (*common, *entry.get("set", [])))


def finished(results: Path) -> dict[str, dict[str, Any]]:
    """Lines of a file of results, by the cell's key; one that was cut off, or made by an older rule, is passed over."""
    found = {}
    for line in results.read_text(encoding="utf-8").splitlines() if results.is_file() else []:
        try:
            result = json.loads(line)
        except json.JSONDecodeError:
            continue
        if result.get("rule") == _rule(result["gossip"]):
            found[result["key"]] = result
    return found


def _rule(gossip: dict[str, Any]) -> int | None:
    """By which rule gamma was found; None where it was given."""
    auto = gossip["method"] == "choco" and gossip["options"].get("gamma", AUTO) == AUTO
    return auto_gamma.VERSION if auto else None


def run(
    cells: Sequence[StudyCell],
    results: Path,
    jobs: int = 1,
    device: str = "cpu",
    extra: Sequence[str] = (),
    budget_seconds: float | None = None,
    tell: Callable[[str], None] = print,
) -> None:
    """Train what is missing, in ``jobs`` processes, until all is done or the time is up."""
    before = finished(results)
    missing = tuple(cell for cell in cells if cell.key not in before)
    tell(f"{len(missing)} of {len(cells)} cells to train, {jobs} at a time")
    deadline = None if budget_seconds is None else time.time() + budget_seconds
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a", encoding="utf-8") as book:
        for result in _results(StudyJob(missing, tuple(extra), device, deadline), jobs):
            if "error" in result:
                tell(f"{result['name']}, seed {result['seed']} failed: {result['error']}")
                continue
            book.write(json.dumps(result) + "\n")
            book.flush()
            final = result["final"]
            fate = "diverged" if final.get("diverged") else f"mean model {final['mean_model']:.4f}"
            tell(f"{result['name']}, seed {result['seed']}: {final['value']:.4f}, {fate}, {final['seconds']:.1f} s")


def _results(work: StudyJob, jobs: int) -> Iterator[dict[str, Any]]:
    """The results of all processes, as they come."""
    if jobs == 1:
        yield from _train(work, count().__next__)
        return
    context = torch.multiprocessing.get_context("spawn")
    counter, queue = context.Value("i", 0), context.Queue()
    processes = [context.Process(target=_worker, args=(work, counter, queue), daemon=True) for _ in range(jobs)]
    for process in processes:
        process.start()
    left = jobs
    while left:
        result = queue.get()
        if result is None:
            left -= 1
        else:
            yield result
    for process in processes:
        process.join()


def _worker(work: StudyJob, counter: Any, queue: Any) -> None:
    def next_one() -> int:
        with counter.get_lock():
            counter.value += 1
            return int(counter.value) - 1

    try:
        for result in _train(work, next_one):
            queue.put(result)
    finally:
        queue.put(None)


def _train(work: StudyJob, next_one: Callable[[], int]) -> Iterator[dict[str, Any]]:
    """One cell after another; the data are read once. A process whose first cell fails gives up."""
    task: Any = None
    usual = 0.0  # seconds of a cell
    while True:
        number = next_one()
        over = work.deadline is not None and time.time() + usual > work.deadline
        if over or number >= len(work.cells):
            return
        cell, began = work.cells[number], time.time()
        try:
            recipe = cell.recipe(work.extra)
            rank_info = simulated_ranks(recipe.train.workers, work.device)
            task = task_of(recipe, rank_info) if task is None else task
            training = Training(recipe, rank_info, task=task)
            records: list[dict[str, Any]] = []
            final = training.go(records.append, lambda *_: None)
        except Exception as wrong:
            traceback.print_exc()
            yield {"name": cell.name, "seed": cell.seed, "error": repr(wrong)}
            if not usual:  # the first one: the others would fare no better
                return
            continue
        usual = usual if "diverged" in final else time.time() - began
        yield _result(cell, training, records, final)


def _result(
    cell: StudyCell, training: Training, records: list[dict[str, Any]], final: dict[str, Any]
) -> dict[str, Any]:
    start = next(record for record in records if record["event"] == "start")
    facts = ("spec", "world", "parameters", "batch", "steps_per_epoch", "steps", "device")
    epochs = [record for record in records if record["event"] == "epoch"]
    kept = ("epoch", "train_loss", "value", "mean_model", "consensus", "gamma")
    plan = training.recipe.gossip.model_dump()
    return {
        "key": cell.key,
        "name": cell.name,
        "seed": cell.seed,
        "recipes": list(cell.recipes),
        "settings": list(cell.settings),
        **{fact: start[fact] for fact in facts},
        "gossip": plan,
        "rule": _rule(plan),
        "epochs": [{name: record.get(name) for name in kept} for record in epochs],
        "final": {name: value for name, value in final.items() if name not in ("rules", "layers")},
        "environment": environment(),
    }
