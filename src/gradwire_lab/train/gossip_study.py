"""Gossip study: a table of decentralized trainings, made by few processes that train one cell after another.

A study is a TOML file: ``recipes``, ``set`` (settings of all cells), and ``[[cell]]`` with a ``name``, its own ``set``
and ``seeds``; for its page (`report.gossip_table`) also ``about``, ``compared`` and ``groups``, and of a cell its
``group`` and the ``published`` figure. Each finished cell is a line of a JSONL file; a cell that has its line is never
trained again, so the same command goes on wherever the last one stopped; but one whose gamma another rule found is.
Small models leave a GPU idle between kernels: several processes share it.
"""

import json
import math
import time
import tomllib
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from gradwire.gossip import auto_gamma
from gradwire.gossip.choco import AUTO
from gradwire_lab.train.data import Task
from gradwire_lab.train.loading import task_of
from gradwire_lab.train.loop import Training
from gradwire_lab.train.rank_info import simulated_ranks
from gradwire_lab.train.recipe import DataTable, Recipe
from gradwire_lab.train.recipe_files import resolve
from gradwire_lab.train.record import append_line, environment
from gradwire_lab.train.run_folder import json_lines
from gradwire_lab.train.time_left import TimeLeft

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


def load(path: Path) -> dict[str, Any]:
    """The file of a study, its keys checked.

    Raises:
        ValueError: It is no study.
    """
    try:
        result = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from None
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
    recipes, common = tuple(result["recipes"]), result.get("set", [])
    cells = [
        StudyCell(entry["name"], seed, recipes, (*common, *entry.get("set", [])))
        for entry in result["cell"]
        for seed in entry.get("seeds", [0])
    ]
    if len({cell.key for cell in cells}) < len(cells):
        raise ValueError(f"{path} has a cell twice; give each a name and settings of its own")
    return cells


def finished(path: Path) -> dict[str, dict[str, Any]]:
    """Lines of a file of results, by the cell's key; one that was cut off, or made by an older rule, is passed over."""
    results = (line for line in json_lines(path) if line.get("rule") == _rule(line["gossip"]))
    return {result["key"]: result for result in results}


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
    log: Callable[[str], None] = print,
) -> None:
    """Train what is missing, in ``jobs`` processes, until all is done, the time is up, or the very first cell fails."""
    before = finished(results)
    missing = [cell for cell in cells if cell.key not in before]
    log(f"{len(missing)} of {len(cells)} cells to train, {jobs} at a time")
    deadline = math.inf if budget_seconds is None else time.time() + budget_seconds
    left = TimeLeft(len(missing), jobs)
    train = partial(_train, extra=tuple(extra), device=device, deadline=deadline)
    with _mapped(train, missing, jobs) as outcomes:
        for number, result in enumerate(outcome for outcome in outcomes if outcome is not None):
            if "error" in result:
                left.skip()
                log(f"{result['name']}, seed {result['seed']} failed: {result['error']}")
                if number == 0:  # the others would fare no better
                    return
                continue
            append_line(results, result)
            final = result["final"]
            fate = "diverged" if final.get("diverged") else f"mean model {final['mean_model']:.4f}"
            left.finish(final["seconds"])
            done = f"{result['name']}, seed {result['seed']}: {final['value']:.4f}, {fate}, {final['seconds']:.1f} s"
            log(left.after(done))


@contextmanager
def _mapped(
    train: Callable[[StudyCell], dict[str, Any] | None], cells: Sequence[StudyCell], jobs: int
) -> Iterator[Iterator[dict[str, Any] | None]]:
    """The results of all cells, as they come."""
    if jobs == 1:
        yield map(train, cells)
        return
    pool = ProcessPoolExecutor(jobs, torch.multiprocessing.get_context("spawn"))
    try:
        yield (future.result() for future in as_completed([pool.submit(train, cell) for cell in cells]))
    finally:
        pool.shutdown(cancel_futures=True)


_seconds = 0.0  # that the last cell of this process took


def _train(cell: StudyCell, extra: tuple[str, ...], device: str, deadline: float) -> dict[str, Any] | None:
    """The result of one cell; None if there is no time left for it."""
    global _seconds
    began = time.time()
    if began + _seconds > deadline:
        return None
    try:
        recipe = cell.recipe(extra)
        task = _task(recipe.data.model_dump_json(), device)
        training = Training(recipe, simulated_ranks(recipe.train.workers, device), task=task)
        records: list[dict[str, Any]] = []
        final = training.run(records.append, lambda *_: None)
    except Exception as error:
        traceback.print_exc()
        return {"name": cell.name, "seed": cell.seed, "error": repr(error)}
    _seconds = _seconds if "diverged" in final else time.time() - began
    return _result(cell, training, records, final)


@cache
def _task(data: str, device: str) -> Task:
    """The data of a table as JSON, which a process reads once."""
    return task_of(Recipe(data=DataTable.model_validate_json(data)), simulated_ranks(1, device))


def _result(
    cell: StudyCell, training: Training, records: list[dict[str, Any]], final: dict[str, Any]
) -> dict[str, Any]:
    start = next(record for record in records if record["event"] == "start")
    facts = ("spec", "world", "parameters", "batch", "steps_per_epoch", "steps", "device")
    epochs = [record for record in records if record["event"] == "epoch"]
    curves = ("epoch", "train_loss", "value", "mean_model", "consensus", "gamma")
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
        "epochs": [{name: record.get(name) for name in curves} for record in epochs],
        "final": {name: value for name, value in final.items() if name not in ("rules", "layers")},
        "environment": environment(),
    }
