"""``gradwire compare RECIPE... --specs "fp32; dgc(0.001)" --seeds 3``: a grid that remembers what it has done."""

import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from gradwire.core.registry import registered
from gradwire_lab.cli.fitted_table import FittedTable
from gradwire_lab.cli.options import AllowCode, Data, Devices, InProcess, Model, Overrides, Processes, RecipeNames
from gradwire_lab.cli.output import check_folder, refuse, refusing, show
from gradwire_lab.report.load import finished
from gradwire_lab.report.run_groups import Group, Task
from gradwire_lab.report.slug import USUAL, run_title
from gradwire_lab.report.statistics import Estimate
from gradwire_lab.report.summary import RATIOS, cells, columns, headline
from gradwire_lab.report.table import markdown_with_note
from gradwire_lab.report.versions import fingerprint
from gradwire_lab.signals import sigterm_interrupts
from gradwire_lab.train.compare import Arm, CellFailed, GridCell, Progress, arms, grid, outcome, run_grid
from gradwire_lab.train.grid_worker import TrainCommand
from gradwire_lab.train.recipe import Recipe, SyncTable
from gradwire_lab.train.recipe_files import resolve, toml_files
from gradwire_lab.train.user_files import hashes, named_files

# What a narrow terminal does without, first to last.
SPARE = ("ranks", "seeds", "95 % interval", "payload ratio", "sent by a rank", "wall time", "wire ratio")


def compare(
    specs: Annotated[
        str,
        typer.Option(
            help="Specs, separated by semicolons; the first is the baseline. 'SPEC; exchange=two_way' sets a key of "
            "[sync] for one, 'SPEC @ optimizer.lr=0.1' any key."
        ),
    ],
    recipes: RecipeNames = None,
    seeds: Annotated[int, typer.Option(min=1, help="Number of seeds of each spec.")] = 3,
    first_seed: Annotated[int, typer.Option(min=0, help="The first of the seeds.")] = 0,
    overrides: Overrides = None,
    runs: Annotated[Path, typer.Option(help="The folder that holds all run folders.")] = Path("runs"),
    suffix: Annotated[str, typer.Option(help="Add this to the names of run folders.")] = "",
    budget_seconds: Annotated[
        float | None, typer.Option(min=0, help="Stop after this time; the same command continues later.")
    ] = None,
    results: Annotated[
        Path | None, typer.Option(help="File of the table, as .md and .json; by default beside the runs.")
    ] = None,
    data: Data = "",
    model: Model = "",
    workers: Processes = None,
    in_process: InProcess = None,
    devices: Devices = "",
    jobs: Annotated[int, typer.Option(min=1, help="Trainings at once. On one GPU, start CUDA's MPS first.")] = 1,
    allow_code: AllowCode = False,
) -> None:
    """Train several specs with several seeds each, and compare them with the first.

    Every cell of the grid, a spec with a seed, is a run folder. Finished cells are skipped, and interrupted ones are
    resumed, so the same command continues where it stopped. With --model and without a recipe, folders have the name of
    the model's file, and the settings of the recipe digits hold.
    """
    name = run_title(recipes or (), model)
    recipes = recipes or list(USUAL)
    deadline = None if budget_seconds is None else time.monotonic() + budget_seconds
    named = {"--data": data, "--workers": workers, "--in-process": in_process, "--devices": devices}
    options = [part for name, value in named.items() if value for part in (name, str(value))]
    options += ["--allow-code"] if allow_code else []
    world = workers or in_process
    typed = f"gradwire {shlex.join(sys.argv[1:])}"
    settings = [*(overrides or ()), *([f"train.workers={world}"] if world else [])]
    settings += [f"model.name={model}"] if model else []
    table = results or runs / f"{'-'.join(filter(None, (name, suffix)))}-results.md"
    with refusing("compare", ValueError):
        if not runs.is_dir():  # one that may only be read will do where all cells are finished
            check_folder("--runs", runs)
        check_folder("--results", table.parent)
        asked = arms(specs)
        _refuse_local(asked)
        files = _check(recipes, asked, settings, allow_code)
        made = grid(recipes, asked, range(first_seed, first_seed + seeds), settings, runs, suffix, files, name)
        _note_apart(made)
        try:
            with sigterm_interrupts():
                runner = TrainCommand(tuple(options), deadline, quiet=jobs > 1)
                progress = run_grid(made, runner, budget_seconds, typed, typer.echo, jobs=jobs)
        except CellFailed as wrong:
            refuse("compare", f"{wrong}\nthe grid ends here, because other cells would probably fail, too", 1)
        except KeyboardInterrupt:
            refuse("compare", "stopped; the same command continues from here", 130)
    task = outcome(made)
    if task is not None:
        show(_table(task), *_words(task), width=160)
        _write(task, made, progress, table)
    _close(progress)


def _refuse_local(asked: Sequence[Arm]) -> None:
    """Refuse local steps that stand where a spec of gradients belongs, and print how they are compared."""
    names = registered("local")
    wrong = [arm for arm in asked if arm.spec.partition("(")[0].strip() in names]
    if wrong:
        meant = "; ".join(_as_local(arm) if arm in wrong else arm.label for arm in asked)
        quoted = shlex.quote(meant) if '"' in meant else f'"{meant}"'
        raise ValueError(
            f"{wrong[0].spec!r} takes local steps, and does not compress gradients; write --specs {quoted}"
        )


def _as_local(arm: Arm) -> str:
    """The same with the key of a recipe that takes local steps; keys of [sync] are those of [local] then."""
    keys = (key.replace("sync.", "local.", 1) if key.startswith("sync.") else key for key in arm.overrides)
    return " @ ".join(("dense", f"local.spec={arm.spec}", *keys))


def _note_apart(made: Sequence[GridCell]) -> None:
    """Say which files have changed since earlier runs of the same name, where there is anything left to train."""
    apart = [
        cell
        for cell in made
        if cell.files and fingerprint(cell.files) in cell.folder.name and not finished(cell.folder)
    ]
    if apart:
        names = ", ".join(sorted({name for cell in apart for name in cell.files}))
        typer.echo(f"{names}, or a file that is imported there, differs from earlier runs; these are kept, and new")
        typer.echo(f"runs go to {apart[0].folder} and the like")


def _check(
    recipes: Sequence[str], asked: Sequence[Arm], settings: Sequence[str], allow_code: bool
) -> dict[Arm, dict[str, str]]:
    """Refuse what the last cell would refuse before the first one trains, and two arms that are the same training.

    Returns:
        Of every arm, hashes of the user's own files that it depends on.
    """
    files: dict[Arm, dict[str, str]] = {}
    known: list[tuple[Recipe, Arm]] = []
    for arm in asked:
        recipe = resolve(recipes, [*settings, f"sync.spec={arm.spec}", *arm.overrides], allow_code)
        gossiping = recipe.own_models
        recipe = recipe.model_copy(update={"sync": SyncTable()}) if gossiping else recipe
        for other in (other for same, other in known if same == recipe):
            hint = (
                "; workers that gossip compress by gossip.codec, as in 'sign @ gossip.codec=sign', and those that take "
                "local steps by local.codec"
                if gossiping
                else ""
            )
            raise ValueError(f"{other.label!r} and {arm.label!r} would be the same training{hint}")
        known.append((recipe, arm))
        files[arm] = hashes([*toml_files(recipes), *named_files(recipe)])
    return files


def _close(progress: Progress) -> None:
    if progress.left:
        typer.echo(f"{len(progress.left)} cells are left; the same command continues")
    for cell, why in progress.failed:
        typer.echo(f"{cell.name} failed: {why}", err=True)
    if progress.failed:
        raise typer.Exit(1)


def _words(task: Task) -> list[Text]:
    return [Text(text) for text in [headline(task)] if text]


def _table(task: Task) -> FittedTable:
    caption = (
        "After the last epoch: mean +- sample standard deviation over seeds. [low, high] is a 95 % t-interval, where "
        f"seeds differ. Differences are seed by seed. {RATIOS}"
    )
    if any(group.diverged for group in task.groups):
        caption += "\nDiverged: the loss is not finite, or most steps were skipped."
    heads = [column.title for column in columns(task)]
    rows = [[cell.text for cell in cells(task, group)] for group in task.groups]
    return FittedTable(task.name, heads, rows, SPARE, caption=caption, elsewhere="the files named below")


def _write(task: Task, made: list[GridCell], progress: Progress, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    page, data = (path.with_name(f"{path.name.removesuffix('.md')}.{kind}") for kind in ("md", "json"))
    counts = {"cells": len(made), "left": len(progress.left), "failed": len(progress.failed)}
    asked = {"grid": [{**cell.asked, "seed": cell.seed} for cell in made]}
    _keep_older(page, data, asked["grid"])
    page.write_text(markdown_with_note([task], path.parent), encoding="utf-8")
    data.write_text(json.dumps(summary(task) | counts | asked, indent=2) + "\n", encoding="utf-8")
    typer.echo(f"{page}, {data}")


def _keep_older(page: Path, data: Path, asked: object) -> None:
    """Rename the results of another grid that these files hold, so that both are kept."""
    if not data.is_file():
        return
    text = data.read_text(encoding="utf-8")
    grid: Any = None
    with suppress(ValueError):
        grid = json.loads(text).get("grid")
        if grid == asked:
            return
    name = _archive_name(data, text, grid)
    for file in (page, data):
        if file.is_file():
            file.rename(file.with_name(f"{name}{file.suffix}"))
    typer.echo(f"the results of another grid are kept as {data.with_name(f'{name}.md')}")


def _archive_name(data: Path, text: str, grid: Any) -> str:
    """With the hash that run folders of the same files have; where that is taken, or there are none, of the text."""
    files = grid[0].get("files") if grid else None
    name = f"{data.stem}-{fingerprint(files)}"
    return name if files and not data.with_name(f"{name}.json").exists() else f"{data.stem}-{fingerprint(text)}"


def summary(task: Task) -> dict[str, object]:
    """The comparison as plain data."""
    specs = [_group(task, group) for group in task.groups]
    return {"task": task.name, "metric": task.metric.name, "unit": task.metric.unit, "specs": specs}


def _group(task: Task, group: Group) -> dict[str, object]:
    least, most, difference = task.metric.least, task.metric.most, task.difference(group)
    return {
        "spec": group.label,
        "values": {seed: _finite(value) for seed, value in group.values.items()},
        **_estimate(group.estimate, least, most),
        "spread": _finite(group.estimate.spread),
        "difference": difference and _estimate(difference, least - most, most - least),
        "diverged": group.diverged,
        "skipped": group.skipped[0],
        **{key: group.mean(key) for key in ("payload_ratio", "sent", "received", "seconds")},
        "wire_ratio": group.wire_ratio,
        "runs": [str(run.folder) for run in group.runs],
    }


def _estimate(estimate: Estimate, least: float, most: float) -> dict[str, object]:
    cut = estimate.within(least, most)
    return {"mean": _finite(estimate.mean), "interval": [_finite(cut.low), _finite(cut.high)]}


def _finite(value: float | None) -> float | None:
    """JSON has no other numbers."""
    return value if value is not None and math.isfinite(value) else None
