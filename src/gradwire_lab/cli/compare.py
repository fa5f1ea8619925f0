"""``gradwire compare RECIPE... --specs "fp32; dgc(0.001)" --seeds 3``: a grid that remembers what it has done."""

import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gradwire_lab.cli.interrupts import sigterm_interrupts
from gradwire_lab.report.run_groups import Task
from gradwire_lab.report.statistics import Estimate
from gradwire_lab.report.summary import cells, columns
from gradwire_lab.report.table import markdown
from gradwire_lab.train.compare import Arm, GridCell, Progress, arms, grid, outcome, run_grid, title
from gradwire_lab.train.grid_worker import TrainCommand


def compare(
    recipes: Annotated[list[str], typer.Argument(help="A recipe and fragments, merged in order.")],
    specs: Annotated[
        str,
        typer.Option(help="Parted by semicolons; the first is the baseline. 'SPEC @ key=value' sets a key for one."),
    ],
    seeds: Annotated[int, typer.Option(min=1, help="How many, from 0 or from --first-seed on.")] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of the seeds.")] = 0,
    overrides: Annotated[list[str] | None, typer.Option("--set", help="A key of the recipe: train.epochs=5.")] = None,
    runs: Annotated[Path, typer.Option(help="Where the run folders lie.")] = Path("runs"),
    suffix: Annotated[str, typer.Option(help="Keeps the folders of two grids apart.")] = "",
    budget_seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop after this time; the same command goes on later.")
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="Where the table goes, as .md and .json; by default beside the runs.")
    ] = None,
    data: Annotated[str, typer.Option(help="The folder that holds data sets in their standard layouts.")] = "",
    workers: Annotated[int | None, typer.Option(min=1, help="Processes on this machine.")] = None,
    in_process: Annotated[int | None, typer.Option(min=1, help="Virtual workers in one process instead.")] = None,
    devices: Annotated[str, typer.Option(help="Of the workers, in order: 0,0,1,1 or cpu.")] = "",
    jobs: Annotated[int, typer.Option(min=1, help="Cells at once; on one GPU, start CUDA's MPS before.")] = 1,
) -> None:
    """Train several specs with several seeds each, and compare them with the first.

    Every cell of the grid is a run folder. Finished cells are skipped and interrupted ones resumed, so that the same
    command goes on wherever the last one stopped.
    """
    deadline = None if budget_seconds is None else time.monotonic() + budget_seconds
    named = {"--data": data, "--workers": workers, "--in-process": in_process, "--devices": devices}
    options = [part for name, value in named.items() if value for part in (name, str(value))]
    world = workers or in_process
    typed = f"gradwire {shlex.join(sys.argv[1:])}"
    settings = (*(overrides or ()), *([f"train.workers={world}"] if world else []))
    try:
        asked = arms(specs)
        _check(recipes, asked, settings)
        made = grid(recipes, asked, range(first_seed, first_seed + seeds), settings, runs, suffix)
        with sigterm_interrupts():
            runner = TrainCommand(tuple(options), deadline, quiet=jobs > 1)
            progress = run_grid(made, runner, budget_seconds, typed, typer.echo, jobs=jobs)
    except ValueError as wrong:
        typer.echo(f"gradwire compare: {wrong}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("stopped; the same command goes on from here", err=True)
        raise typer.Exit(130) from None
    task = outcome(made)
    if task is not None:
        Console(width=None if sys.stdout.isatty() else 160).print(_table(task))
        _write(task, made, progress, results or runs / f"{'-'.join(filter(None, (title(recipes), suffix)))}-results.md")
    _close(progress)


def _check(recipes: Sequence[str], asked: Sequence[Arm], settings: Sequence[str]) -> None:
    """Refuse what the last cell would refuse before the first one trains, and two arms that are the same training."""
    from gradwire_lab.train.recipe import Recipe, SyncTable
    from gradwire_lab.train.recipe_files import resolve

    known: list[tuple[Recipe, Arm]] = []
    for arm in asked:
        recipe = resolve(recipes, [*settings, f"sync.spec={arm.spec}", *arm.overrides])
        gossiping = bool(recipe.gossip.method)
        recipe = recipe.model_copy(update={"sync": SyncTable()}) if gossiping else recipe
        for other in (other for same, other in known if same == recipe):
            hint = (
                "; workers that gossip compress by gossip.codec, as in 'sign @ gossip.codec=sign'" if gossiping else ""
            )
            raise ValueError(f"{other.label!r} and {arm.label!r} would be the same training{hint}")
        known.append((recipe, arm))


def _close(progress: Progress) -> None:
    if progress.left:
        typer.echo(f"{len(progress.left)} cells are left; the same command goes on from here")
    for cell, why in progress.failed:
        typer.echo(f"{cell.name} failed: {why}", err=True)
    if progress.failed:
        raise typer.Exit(1)


def _table(task: Task) -> Table:
    table = Table(title=task.name, title_justify="left")
    for column in columns(task):
        table.add_column(column.title, justify="right" if column.numeric else "left", overflow="fold")
    for group in task.groups:
        table.add_row(*(cell.text for cell in cells(task, group)))
    table.caption = (
        "after the last epoch: mean +- sample standard deviation over seeds; intervals are t-intervals, "
        "where seeds differ; differences are seed by seed"
    )
    if any(group.diverged for group in task.groups):
        table.caption += "\ndiverged: the loss is not finite, or most steps were skipped"
    table.caption_justify = "left"
    return table


def _write(task: Task, made: list[GridCell], progress: Progress, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    page, data = (path.with_name(f"{path.name.removesuffix('.md')}.{kind}") for kind in ("md", "json"))
    page.write_text(markdown([task], path.parent), encoding="utf-8")
    told = summary(task) | {"cells": len(made), "left": len(progress.left), "failed": len(progress.failed)}
    data.write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")
    typer.echo(f"{page}, {data}")


def summary(task: Task) -> dict[str, object]:
    """The comparison as plain data."""
    return {"task": task.name, "metric": task.metric.name, "unit": task.metric.unit, "specs": _specs(task)}


def _finite(value: float | None) -> float | None:
    """JSON has no other numbers."""
    return value if value is not None and math.isfinite(value) else None


def _interval(told: Estimate, least: float, most: float) -> list[float | None]:
    cut = told.within(least, most)
    return [_finite(cut.low), _finite(cut.high)]


def _specs(task: Task) -> list[dict[str, object]]:
    told: list[dict[str, object]] = []
    least, most = task.metric.least, task.metric.most
    for group in task.groups:
        difference = task.difference(group)
        told.append(
            {
                "spec": group.label,
                "values": {seed: _finite(value) for seed, value in group.values.items()},
                "mean": _finite(group.estimate.mean),
                "spread": _finite(group.estimate.spread),
                "interval": _interval(group.estimate, least, most),
                "difference": difference
                and {"mean": _finite(difference.mean), "interval": _interval(difference, least - most, most - least)},
                "diverged": group.diverged,
                "skipped": group.skipped[0],
                **{key: group.mean(key) for key in ("payload_ratio", "sent", "received", "seconds")},
                "wire_ratio": group.wire_ratio,
                "runs": [str(run.folder) for run in group.runs],
            }
        )
    return told
