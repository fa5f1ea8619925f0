"""``gradwire advise``: whether to compress, and how, on a link that is described or probed."""

import json
import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.text import Text

from gradwire.comm.rates import LinkSpec
from gradwire.engine import method
from gradwire_lab.bench.network import calibrate, calibration_cache, devices, workloads
from gradwire_lab.bench.network.workloads import Workload
from gradwire_lab.cli.advice_text import advice_table, as_object, call, verdict
from gradwire_lab.cli.local_text import local_table, not_trained, phases_text, why_local
from gradwire_lab.cli.options import AsJson
from gradwire_lab.cli.output import refusing, show
from gradwire_lab.cli.plan import facts_and_steps
from gradwire_lab.launch import RankError, join_group
from gradwire_lab.launcher_env import LauncherRank, launcher_rank
from gradwire_lab.perf_model.accuracy_records import free_of_losses, is_adaptive, optimizer_name
from gradwire_lab.perf_model.advice import Advice, Predict, RateRange, break_even
from gradwire_lab.perf_model.advice import advise as weigh
from gradwire_lab.perf_model.calibration import Calibration, load
from gradwire_lab.perf_model.calibration import save as write
from gradwire_lab.perf_model.candidates import CANDIDATES, PRESETS, arguments, suits_adaptive, weighed
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import predict
from gradwire_lab.perf_model.local_steps import MESSAGES, TOO_SLOW, LocalComparison, local_comparison, trainings
from gradwire_lab.perf_model.model import ModelProfile
from gradwire_lab.perf_model.probe import probe, timeout_message
from gradwire_lab.perf_model.training_time import STEPS, SingleSteps, single_steps
from gradwire_lab.train.data import load as load_data
from gradwire_lab.train.data.images import ImageTask
from gradwire_lab.train.loading import batch_of
from gradwire_lab.train.models import build
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.recipe_files import resolve
from gradwire_lab.train.spec_lists import split_specs
from gradwire_lab.train.user_files import data_beside, hashes, named_files

_SECONDS = 6.0  # to be spent on microbenchmarks, unless single ones take longer
_LONGEST_TIMEOUT = 86400.0


def advise(
    recipes: Annotated[list[str] | None, typer.Argument(help="A recipe and fragments; or give --model.")] = None,
    model: Annotated[str, typer.Option(help="The model: your own, mine.py:make, or lstm, resnet20, gpt.")] = "",
    workers: Annotated[
        int | None, typer.Option(min=2, help="Number of workers; or give --hosts and --per-host.")
    ] = None,
    link: Annotated[str, typer.Option(help="Link between hosts: 100mbit,5ms. Under torchrun it may be probed.")] = "",
    hosts: Annotated[int | None, typer.Option(min=1, help="Number of hosts.")] = None,
    per_host: Annotated[
        int | None, typer.Option(min=1, help="Workers of a host, whose gradients are summed there first. By default 1.")
    ] = None,
    inside: Annotated[str, typer.Option(help="The link between workers of a host.")] = "unshaped",
    sharing: Annotated[
        int | None, typer.Option(min=1, help="Workers that share a machine's cores; by default --per-host.")
    ] = None,
    specs: Annotated[
        str, typer.Option(help="Specs to compare, separated by semicolons; by default candidates and presets.")
    ] = "",
    calibration: Annotated[
        Path | None, typer.Option(help="Read figures that --save wrote, and measure nothing.")
    ] = None,
    save: Annotated[Path | None, typer.Option(help="Write the figures to a file.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, even if figures are cached.")] = False,
    optimizer: Annotated[
        str,
        typer.Option(
            help="The optimizer: sgd, adamw, ...; by default the recipe's. Specs that starve it are not taken."
        ),
    ] = "",
    dtype: Annotated[
        str, typer.Option(help="Format of gradients: float32, bfloat16, ...; by default the model's.")
    ] = "",
    device: Annotated[
        str, typer.Option(help="The device: cpu, cuda (the GPUs in turn), cuda:1; by default the model's.")
    ] = "",
    max_loss: Annotated[
        float,
        typer.Option(min=0, help="Percent that a spec or local steps may have lost against dense training."),
    ] = 1.0,
    overlap: Annotated[bool, typer.Option(help="Send messages during the backward pass, as under DDP.")] = True,
    probe_timeout: Annotated[float, typer.Option(help="Seconds that a probe waits for other ranks.")] = 10.0,
    patience: Annotated[float | None, typer.Option(hidden=True)] = None,
    as_json: AsJson = False,
) -> None:
    """Predict whether compression pays, which spec to take, and what to expect of it.

    Specs that lost more than --max-loss in the project's own trainings, or that were not tested there, are shown, but
    taken only if --specs names them. Local steps that lost more are named where nothing else suits the link.
    Computing and compressing are measured here, on the processors of this machine or with --device cuda on its GPUs,
    in the format of --dtype. --link gives the link. Without it, start this by torchrun on all hosts: a short probe
    between the ranks then measures the link, and there are as many workers as ranks.
    """
    if patience is not None:
        warnings.warn("advise --patience is now --probe-timeout", FutureWarning, stacklevel=2)
        probe_timeout = patience
    with refusing("advise", ValueError, TypeError), refusing("advise", RankError, code=1):
        asked = tuple(split_specs(specs, commas=True))
        for spec in asked:
            method(arguments(spec)[0])
        where = launcher_rank(os.environ)
        cluster = _cluster(workers, hosts, per_host, _link(link, where, probe_timeout), inside, where)
        if where is not None and where.rank:  # rank 0 prints
            return
        sharers = sharing or (cluster.per_host if where is None else where.local_world)
        measured = tuple(dict.fromkeys((*asked, *MESSAGES) if asked else (*CANDIDATES, *PRESETS, *MESSAGES)))
        found = _calibration(Wanted(recipes, model, measured, device, dtype), cluster, sharers, fresh, calibration)
        for spec in asked:
            found.cost(spec, cluster.workers)  # or an error that names what was calibrated
        if save is not None:
            write(found, save)
        predictor = partial(predict, overlaps=overlap, across=cluster.per_host > 1)
        named = resolve(recipes or ["digits"]).optimizer.name if recipes or not model else "sgd"
        advice, barred = _weigh(found, cluster, asked, optimizer_name(optimizer or named), max_loss / 100, predictor)
        single = single_steps(found, cluster, advice.choice, advice.optimizer, predictor)
        rounds = local_comparison(found, cluster, single, predictor, advice.max_loss)
    way = advice.choice if advice.compresses else advice.runner_up or advice.fastest
    limit = way.spec, break_even(found, cluster, way.spec, predictor)
    if as_json:
        typer.echo(json.dumps(as_object(found, cluster, advice, limit, rounds)))
        return
    _show_advice(found, cluster, advice, barred, limit, single, rounds)
    if calibration_cache.NOT_KEPT in found.note:
        show(Text(calibration_cache.REPEAT), width=160)
    if not (optimizer or recipes) and model:
        typer.echo("\nThe optimizer is taken to be SGD. Give --optimizer if it is not.")


def _weigh(
    found: Calibration, cluster: Cluster, asked: Sequence[str], optimizer: str, max_loss: float, predictor: Predict
) -> tuple[Advice, Sequence[str]]:
    """Advice, and what it may not take: none of what the person asks about, else what lost too much, or may have."""
    chosen = asked or weighed(optimizer, across=cluster.per_host > 1)
    fitting = [spec for spec in CANDIDATES if suits_adaptive(spec) or not is_adaptive(optimizer)]
    taken = free_of_losses(fitting, optimizer, found.model.kind, max_loss)
    barred = () if asked else tuple({*chosen} - {*taken})
    advice = weigh(found, cluster, chosen, predictor, barred=barred)
    return replace(advice, optimizer=optimizer, max_loss=max_loss), barred


def _show_advice(
    found: Calibration,
    cluster: Cluster,
    advice: Advice,
    barred: Sequence[str],
    limit: tuple[str, RateRange | None],
    single: SingleSteps,
    rounds: LocalComparison | None,
) -> None:
    """What was weighed and what to take, then local steps where every single step is slow."""
    too_slow = single.total_seconds > (1 + TOO_SLOW) * STEPS * found.compute
    better = rounds is not None and rounds.chosen is not None
    show(advice_table(found, cluster, advice, barred), Text(verdict(found, advice, limit, better)), width=160)
    if advice.compresses:
        typer.echo(call(advice.choice, cluster))
    if too_slow and not trainings(advice.optimizer):
        show(*map(Text, filter(None, [not_trained(advice, found.compute)])), width=160)
    elif too_slow and rounds is not None:
        _show_local(found, rounds)


def _show_local(found: Calibration, rounds: LocalComparison) -> None:
    """Local steps: why, which there are, and what to write."""
    show(Text(why_local(found, rounds)), local_table(found, rounds), width=160)
    if rounds.chosen is not None:
        show(Text(phases_text(rounds.chosen)), width=160)
        typer.echo(f"outer = {rounds.chosen.call}")


def _cluster(
    workers: int | None,
    hosts: int | None,
    per_host: int | None,
    link: LinkSpec,
    inside: str,
    where: LauncherRank | None,
) -> Cluster:
    """As the person says, or as the ranks have been started. Those of a single host exchange among themselves."""
    each = per_host or (1 if where is None or where.local_world == where.world else where.local_world)
    if hosts is not None and workers not in (None, hosts * each):
        raise ValueError(f"{hosts} hosts of {each} are not {workers} workers; leave one of them out")
    usual = 4 * each if where is None else where.world
    count = hosts * each if hosts is not None else workers or usual
    if where is not None and count != where.world:
        raise ValueError(
            f"there are {where.world} ranks, but --workers or --hosts makes {count}; leave these out, or start this "
            "once, without a launcher, with --link"
        )
    if count < 2:
        raise ValueError("a single worker has no other to send to; give 2 workers or more")
    return Cluster(count, link, each, LinkSpec.parse(inside))


def _link(text: str, where: LauncherRank | None, timeout: float) -> LinkSpec:
    """As described, or as the ranks that torchrun started measure it."""
    if not 0 < timeout <= _LONGEST_TIMEOUT:
        raise ValueError(f"a probe cannot wait {timeout:g} s; give --probe-timeout more than 0, and a day at most")
    if text:
        return LinkSpec.parse(text)
    if where is None:
        raise ValueError(
            "the link between the workers is not known; give --link 100mbit,5ms, or start this by torchrun on all hosts"
        )
    limit = timedelta(seconds=timeout)
    try:
        with join_group(where, "gloo", limit, limit):
            found = probe(timeout)
    except RuntimeError:  # a rank never came, and torch says so in many ways
        raise ValueError(timeout_message(timeout)) from None
    typer.echo(f"rank {where.rank} of {where.world}: the link is about {found}", err=True)
    return found


class Wanted(NamedTuple):
    """What a person asks about."""

    recipes: list[str] | None
    model: str
    specs: tuple[str, ...]
    device: str
    dtype: str


def _calibration(wanted: Wanted, cluster: Cluster, sharers: int, fresh: bool, saved: Path | None) -> Calibration:
    """Of a file, from the cache, or measured; in the format that is wanted."""
    if wanted.dtype:
        ModelProfile({}, dtype=wanted.dtype)  # or an error that names those there are
    found = _figures(wanted, cluster, sharers, fresh) if saved is None else load(saved)
    return replace(found, model=replace(found.model, dtype=wanted.dtype or found.model.dtype))


def _figures(wanted: Wanted, cluster: Cluster, sharers: int, fresh: bool) -> Calibration:
    """From the cache, or measured."""
    make, facts = _subject(wanted.recipes, wanted.model, cluster.workers)
    parties = cluster.hosts if cluster.per_host > 1 else cluster.workers
    device = devices.parse(wanted.device)
    here = devices.facts(device, wanted.dtype)
    home = calibration_cache.place({**facts, **here, "specs": wanted.specs, "speakers": parties, "beside": sharers})
    found = None if fresh else calibration_cache.find(home)
    if found is None:
        job = calibrate.CalibrationJob(make, wanted.specs, parties, seconds=_SECONDS, device=device, dtype=wanted.dtype)
        job = calibrate.checked(job)  # what is wrong with it is an error here, and not of a rank
        more = "up to a minute more where kernels are compiled for the first time"
        typer.echo(f"measuring here; about {1.5 * _SECONDS:.0f} s left, and {more}", err=True)
        busy = calibration_cache.disturbance()
        found = calibrate.calibrate(job, sharers)
        if busy:
            return replace(found, note=f"{found.note}, {busy}")
        calibration_cache.keep(found, home)
    return found


def _subject(recipes: list[str] | None, model: str, workers: int) -> tuple[Callable[[], Workload], dict[str, str]]:
    """How to make the workload, and what its figures depend on."""
    if model and workloads.is_workload(model):
        if recipes:
            raise ValueError(f"{model} brings its own batches; leave the recipe {' '.join(recipes)} or --model out")
        return partial(workloads.load, model), {"model": model, "source": workloads.source(model)}
    names = [f"model.name={model}"] if model else []
    if not recipes and (data := data_beside(model)):
        names.append(f"data.name={data}")
    recipe = resolve(recipes or ["digits"], names)
    facts = {"recipe": recipe.model_dump_json(), "workers": str(workers), "files": str(hashes(named_files(recipe)))}
    return partial(recipe_workload, recipe, workers), facts


def recipe_workload(recipe: Recipe, world: int) -> Workload:
    """A step of a recipe, on a random batch of the shape that its data have."""
    facts, _ = facts_and_steps(recipe, world)
    model, batch = build(recipe.model.name, recipe.model.options, facts, seed=0), batch_of(recipe, world)
    side = facts.get("size", recipe.data.size)
    shape = (batch, recipe.data.length) if "vocab" in facts else (batch, facts.get("channels", 3), side, side)
    own = (
        load_data(recipe.data.name, recipe.data.root or None, recipe.data.options) if ":" in recipe.data.name else None
    )
    if isinstance(own, ImageTask):  # which need not be square
        shape = (batch, *own.train.pixels.shape[1:])
    return workloads.on_random_batch(model, facts, shape)
