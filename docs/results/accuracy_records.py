"""``python docs/results/accuracy_records.py RUNS...``: lines for `accuracy_records.jsonl` of `perf_model`."""

import json
import math
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import fmean

from gradwire_lab.cli.advise import recipe_workload
from gradwire_lab.perf_model.accuracy_records import AccuracyRecord
from gradwire_lab.perf_model.model import ModelProfile
from gradwire_lab.report.load import find, load
from gradwire_lab.report.run_groups import Group, Task, tasks
from gradwire_lab.train.recipe import Recipe


def collected(folders: Iterable[Path]) -> Iterator[AccuracyRecord]:
    """Every group of finished runs that has a dense baseline."""
    runs, empty = find(folders)
    if empty:
        raise ValueError(f"there is no run in {', '.join(map(str, empty))}")
    for task in tasks([load(folder) for folder in runs]):
        for group in task.groups:
            if group.ended and _usual(group) and (record := _compared(task, group)) is not None:
                yield record


def _usual(group: Group) -> bool:
    """Whether it was compressed by layers and from the first step on, as advice means a spec."""
    sync = group.runs[0].recipe.get("sync", {})
    return not group.dense and sync.get("granularity", "layer") == "layer" and not sync.get("ramp")


def _spec_text(group: Group) -> str:
    """The spec, and what else the recipe says of it."""
    sync = group.runs[0].recipe.get("sync", {})
    named = [(key, sync.get(key, "auto")) for key in ("feedback", "exchange")]
    return "; ".join([group.spec, *(f"{key}={value}" for key, value in named if value != "auto")])


def _compared(task: Task, group: Group) -> AccuracyRecord | None:
    versus, baseline = task.difference(group), task.baseline_of(group)
    if versus is None or baseline is None or math.isnan(versus.mean):
        return None
    shared = set(group.values) & set(baseline.values)
    ratio = group.mean("payload_ratio")
    return AccuracyRecord(
        _spec_text(group),
        task.name,
        task.metric.axis,
        group.runs[0].world,
        len(shared),
        round(fmean(baseline.values[seed] for seed in shared), 4),
        round(versus.mean, 4),
        None if versus.low is None else round(versus.low, 4),
        None if versus.high is None else round(versus.high, 4),
        None if ratio is None else round(ratio, 2),
        task.metric.larger_is_better,
        kind=_kind(group),
    )


def _kind(group: Group) -> str:
    """Of the model of a recipe, by its tensors. Its data need not be here."""
    run = group.runs[0]
    tables = {"data": {"name": run.recipe["data"]["name"]}, "model": run.recipe["model"]}
    workload = recipe_workload(Recipe.model_validate(tables), run.world)
    return ModelProfile.of(dict(workload.model.named_parameters())).kind


if __name__ == "__main__":
    for one in collected(map(Path, sys.argv[1:])):
        print(json.dumps(asdict(one)))
