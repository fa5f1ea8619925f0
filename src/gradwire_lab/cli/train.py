"""``gradwire train RECIPE...``, ``evaluate RUN``, ``plan RECIPE...`` and ``recipes``."""

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from gradwire.comm.emulated import VARIABLE, set_emulated_link
from gradwire.comm.liveness import PeerLostError
from gradwire_lab.cli.options import (
    AllowCode,
    Data,
    Devices,
    InProcess,
    Link,
    Model,
    Overrides,
    Processes,
    RecipeNames,
    RecipeSpec,
    Seed,
)
from gradwire_lab.cli.output import refuse, refusing, show
from gradwire_lab.cli.plan import parts
from gradwire_lab.launch import RankError
from gradwire_lab.launcher_env import launcher_rank
from gradwire_lab.report.run_log import parsed
from gradwire_lab.report.slug import USUAL, run_title
from gradwire_lab.signals import sigterm_interrupts
from gradwire_lab.train import checkpoint, run_modes
from gradwire_lab.train.display import Display
from gradwire_lab.train.gossip_workers import check_graph
from gradwire_lab.train.loading import batch_of
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.recipe_files import dumps, load, registered, resolve
from gradwire_lab.train.record import open_folder
from gradwire_lab.train.resume_check import check_resume
from gradwire_lab.train.run_folder import begun, locked, noting_failure
from gradwire_lab.train.run_recipe import TrainJob
from gradwire_lab.train.run_recipe import evaluate as examine
from gradwire_lab.train.user_files import data_beside, hashes, named_files

INTERRUPTED = 130


def train(
    recipes: RecipeNames = None,
    overrides: Overrides = None,
    spec: RecipeSpec = None,
    data: Data = "",
    model: Model = "",
    seed: Seed = None,
    workers: Processes = None,
    in_process: InProcess = None,
    devices: Devices = "",
    suffix: Annotated[str, typer.Option(help="Add this to the name of the run's folder.")] = "",
    runs: Annotated[Path, typer.Option(help="The folder that holds all run folders.")] = Path("runs"),
    folder: Annotated[
        Path | None, typer.Option(help="The run's folder; by default its name is recipe, suffix and seed.")
    ] = None,
    link: Link = "",
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the last checkpoint, if there is one.")
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Start again in a folder that holds a run.")] = False,
    allow_code: AllowCode = False,
) -> None:
    """Train a recipe.

    --workers starts processes on this machine. Under torchrun, mpirun, horovodrun or srun, the command is one rank.
    --in-process simulates workers in lockstep on one device, with the same arithmetic and the same bytes. With --model
    and without a recipe, the folder has the name of the model's file, and the settings of the recipe digits hold.
    """
    names, title = recipes or list(USUAL), run_title(recipes or (), model)
    with refusing("train", ValueError, OSError):
        if link and in_process:
            raise ValueError("simulated workers have no link to emulate; leave --link or --in-process out")
        keys = {"sync.spec": spec, "data.root": data or None, "model.name": model or None, "train.seed": seed}
        recipe = _resolve(names, overrides, keys, allow_code)
        if link and recipe.gossip.elastic:
            raise ValueError("connections of gossip.elastic are not emulated; leave --link or gossip.elastic out")
        if not in_process:
            # A bad link is an error here, and not of every rank.
            set_emulated_link(link or os.environ.get(VARIABLE, ""))
        place = folder or runs / "-".join(filter(None, (title, suffix, str(recipe.train.seed))))
        job = TrainJob(recipe, place, (), resume, title)
        _start(job, workers, in_process, devices, overwrite)


def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    last: Annotated[bool, typer.Option("--last", help="Evaluate the last checkpoint, not the best.")] = False,
    split: Annotated[str, typer.Option(help="The split: test; text also has valid.")] = "test",
    data: Data = "",
    model: Model = "",
    allow_code: AllowCode = False,
    device: Annotated[str, typer.Option(help="The device: cpu, 0, ...; by default the first GPU.")] = "",
) -> None:
    """Evaluate a checkpoint of a run."""
    with refusing("evaluate", ValueError, OSError):
        if not (run / "recipe.toml").is_file():
            raise ValueError(f"{run} is not a run folder: it has no recipe.toml; name one such as runs/digits-0")
        where = run_modes.device_of(0, run_modes.devices_of(device, 1))
        recipe = load(run / "recipe.toml", model, data, allow_code)
        score = examine(run, recipe, "last" if last else "best", split, where)
        value = f"{score.value:.2%}" if score.metric == "top1" else f"{score.value:.3f}"
        top5 = "" if score.top5 is None else f", top5 {score.top5:.2%}"
        typer.echo(f"{split} loss {score.loss:.4f}, {score.metric} {value}{top5}")


def plan(
    recipes: RecipeNames = None,
    overrides: Overrides = None,
    spec: RecipeSpec = None,
    data: Data = "",
    model: Model = "",
    workers: Annotated[int | None, typer.Option(min=1, help="Number of workers; by default the recipe's.")] = None,
    toml: Annotated[bool, typer.Option("--toml", help="Print only the resolved recipe.")] = False,
    allow_code: AllowCode = False,
) -> None:
    """Print what a training would do: steps, optimizer, lanes, and the bytes of a step."""
    with refusing("plan", ValueError, OSError):
        keys = {"sync.spec": spec, "data.root": data or None, "model.name": model or None}
        recipe = _resolve(recipes or list(USUAL), overrides, keys, allow_code)
        if toml:
            typer.echo(dumps(recipe), nl=False)
            return
        show(*parts(recipe, workers or recipe.train.workers), width=160)


def recipes(
    fragments: Annotated[bool, typer.Option("--fragments", help="List only the fragments.")] = False,
) -> None:
    """List recipes, and the fragments that may be added to them."""
    for wanted, heading in ((False, "Recipes"), (True, "Fragments, to be added to a recipe")):
        if fragments and not wanted:
            continue
        table = Table(title=heading, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
        for entry in registered().values():
            if entry.fragment is wanted:
                table.add_row(Text(entry.name, style="bold"), Text(entry.about))
        show(table, width=160)


# -- training ----------------------------------------------------------------------------------------------------------


def _resolve(names: list[str], overrides: list[str] | None, keys: dict[str, Any], allow_code: bool) -> Recipe:
    """A recipe with overrides, and with keys that have options of their own."""
    given = [f"{key}={value}" for key, value in keys.items() if value is not None]
    recipe, spec = resolve(names, [*given, *(overrides or [])], allow_code), keys["sync.spec"]
    if spec and recipe.own_models:
        kind, table = ("gossip", "gossip") if recipe.gossip.method else ("take local steps", "local")
        raise ValueError(f"--spec is not for workers that {kind}; write --set '{table}.codec={spec}' instead")
    return recipe


def _start(job: TrainJob, workers: int | None, in_process: int | None, devices: str, overwrite: bool) -> None:
    where, recipe, folder = launcher_rank(os.environ), job.recipe, job.folder
    if sum(x is not None for x in (workers, in_process, where)) > 1:
        raise ValueError(
            "give one of --workers, which starts processes, and --in-process, which simulates them; under torchrun, "
            "mpirun or srun, which start them, give neither"
        )
    first = where is None or where.rank == 0
    resume = job.resume or (where is not None and where.attempt > 0)  # or it was restarted
    world = in_process or workers or (recipe.train.workers if where is None else where.world)
    batch_of(recipe, world)  # or a sentence, before hundreds are started
    if first:
        check_graph(recipe, world)
    workers = workers or recipe.train.workers
    named = run_modes.devices_of(devices, None if where is not None else 1 if in_process else workers)
    if first or not recipe.gossip.elastic:  # ranks that come one by one find what the first has begun
        _refuse_begun(folder, recipe, resume, overwrite)
    if first:
        _note_unused(recipe)
        if resume and begun(folder):
            _note_changed(folder, recipe)
    with locked(folder) if first else nullcontext(), sigterm_interrupts(), Display() as display:
        _train(job._replace(devices=named), where, workers, in_process, display.show)
    if first:
        typer.echo(str(folder))


def _note_unused(recipe: Recipe) -> None:
    """Say what is not used: the spec of workers that gossip, and data that the model's file has."""
    if recipe.sync.spec not in ("dense", "fp32") and recipe.gossip.method and not recipe.gossip.codec:
        typer.echo(
            f"these workers gossip in float32: sync.spec = {recipe.sync.spec!r} is not used; to compress, write "
            "--set gossip.codec=CODEC",
            err=True,
        )
    beside = data_beside(recipe.model.name)
    if beside and ":" not in recipe.data.name:
        name = recipe.data.name
        typer.echo(f"trains on {name}; {beside} is not used, unless you add --set data.name={beside}", err=True)


def _note_changed(folder: Path, recipe: Recipe) -> None:
    """Say that a file of the user's own has changed since the run's last session."""
    before = parsed(folder / "environment.json", lambda text: json.loads(text or "{}").get("files", {}))
    for name, now in hashes(named_files(recipe)).items():
        if before.get(name, now) != now:
            typer.echo(f"{name} has changed since {folder} was trained with it", err=True)


def _train(
    job: TrainJob, where: Any, workers: int, in_process: int | None, display: Callable[[dict[str, Any]], None]
) -> None:
    first = where is None or where.rank == 0
    opened = not first  # only the first rank gets records

    def listen(record: dict[str, Any]) -> None:
        nonlocal opened
        if record["event"] == "start":
            opened = True
            open_folder(job.folder, job.recipe)  # not before: what is refused leaves the folder as it was
        display(record)

    try:
        with noting_failure(job.folder) if first else nullcontext():
            if where is not None:
                run_modes.train_as_rank(job, where, listen)
            elif in_process is not None or workers == 1:
                run_modes.train_in_process(job, in_process or 1, listen)
            else:
                run_modes.train_spawned(job, workers, listen)
    except (RankError, PeerLostError, OSError) as wrong:
        why = f"cannot use {wrong.filename}: {wrong.strerror}" if isinstance(wrong, OSError) else wrong
        refuse("train", wrong if not opened else f"{why}\n{_left(job.folder)}" if begun(job.folder) else why, 1)
    except KeyboardInterrupt:
        refuse("train", f"stopped; {_left(job.folder)}" if opened else "stopped before the first step", INTERRUPTED)


def _left(folder: Path) -> str:
    """What there is to go on from."""
    try:
        found = checkpoint.find(folder, "last")
        if found is None:
            return f"there is no checkpoint in {folder} to continue from"
        checkpoint.inspect(found)
    except checkpoint.Damaged as wrong:
        return str(wrong)
    return "the last checkpoint is whole: --resume continues from it"


def _refuse_begun(folder: Path, recipe: Recipe, resume: bool, overwrite: bool) -> None:
    """Refuse to write over a run; on every rank, or those that do not write would wait for the one that does."""
    if resume:
        check_resume(folder, recipe)
    elif begun(folder) and not overwrite:
        raise ValueError(
            f"{folder} holds a run already; continue with --resume, start again with --overwrite, or add --suffix"
        )
