"""``gradwire advise``: whether to compress, and how, on a link that is described or probed."""

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.text import Text

from gradwire.comm.rates import LinkSpec
from gradwire_lab.cli.advice_text import advice_table, as_object, verdict
from gradwire_lab.cli.output import refusing, show

if TYPE_CHECKING:
    from gradwire_lab.bench.network.workloads import Workload
    from gradwire_lab.launcher_env import LauncherRank
    from gradwire_lab.perf_model.advice import Advice, Predict
    from gradwire_lab.perf_model.break_even import RateRange
    from gradwire_lab.perf_model.calibration import Calibration
    from gradwire_lab.perf_model.cluster import Cluster
    from gradwire_lab.perf_model.costs import Prediction
    from gradwire_lab.train.recipe import Recipe

_SECONDS = 6.0  # to be spent on microbenchmarks, unless single ones take longer
_LONGEST_PATIENCE = 86400.0
_OPTION = re.compile(r"\s*\w+\s*=")

# Whatever imports torch is imported where it is used: help and refusals should not wait for it.


def advise(
    recipes: Annotated[list[str] | None, typer.Argument(help="A recipe and fragments; or give --model.")] = None,
    model: Annotated[str, typer.Option(help="lstm, resnet20, gpt, or mine.py:make, as for bench network.")] = "",
    workers: Annotated[int | None, typer.Option(min=2, help="How many; or give --hosts and --per-host.")] = None,
    link: Annotated[str, typer.Option(help="Between hosts: 100mbit,5ms. Under torchrun it may be probed.")] = "",
    hosts: Annotated[int | None, typer.Option(min=1, help="How many.")] = None,
    per_host: Annotated[
        int | None, typer.Option(min=1, help="Workers of a host, whose gradients are added up there first; else 1.")
    ] = None,
    inside: Annotated[str, typer.Option(help="The link between workers of a host.")] = "unshaped",
    sharing: Annotated[
        int | None, typer.Option(min=1, help="Workers that share a machine's cores, measured so; else --per-host.")
    ] = None,
    specs: Annotated[str, typer.Option(help="What to weigh, parted by commas; else candidates and presets.")] = "",
    calibration: Annotated[Path | None, typer.Option(help="Figures that --save wrote, instead of measuring.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the figures to a file.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, though figures are kept.")] = False,
    dtype: Annotated[str, typer.Option(help="Of gradients: float32, bfloat16, ...; else the model's own.")] = "",
    device: Annotated[str, typer.Option(help="cpu, cuda (the GPUs in turn), cuda:1; else where the model is.")] = "",
    overlap: Annotated[bool, typer.Option(help="As under DDP: messages leave during the backward pass.")] = True,
    patience: Annotated[float, typer.Option(help="Seconds that a probe waits for other ranks.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Say whether compression pays, which spec to take, and what to expect of it.

    Specs that lost more than a percent in the project's own trainings, or that nobody has trained with, are shown, but
    taken only if --specs names them.
    Computing and compressing are measured here, on the processors of this machine or with --device cuda on its GPUs,
    in the format that --dtype says. The link is what --link says; started by torchrun on all hosts without it, a short
    probe between the ranks tells, and there are as many workers as ranks.
    """
    from gradwire.engine import method
    from gradwire_lab.launch import RankError
    from gradwire_lab.launcher_env import launcher_rank
    from gradwire_lab.perf_model.accuracy_records import free_of_losses
    from gradwire_lab.perf_model.advice import advise as weigh
    from gradwire_lab.perf_model.candidates import CANDIDATES, PRESETS, arguments
    from gradwire_lab.perf_model.model import ModelProfile

    with refusing("advise", ValueError, TypeError), refusing("advise", RankError, code=1):
        chosen = tuple(part.strip() for part in _parted(specs)) or (*CANDIDATES, *PRESETS)
        for spec in chosen:
            method(arguments(spec)[0])
        where = launcher_rank(os.environ)
        cluster = _cluster(workers, hosts, per_host, _link(link, where, patience), inside, where)
        if where is not None and where.rank:  # another one speaks
            return
        beside = sharing or (cluster.per_host if where is None else where.local_world)
        wanted = Wanted(recipes, model, chosen, device, dtype)
        if dtype:
            ModelProfile({}, dtype=dtype)  # or a sentence that says which there are
        found = _figures(wanted, cluster, beside, fresh) if calibration is None else _read(calibration)
        found = replace(found, model=replace(found.model, dtype=dtype or found.model.dtype))
        for spec in chosen if specs else ():
            found.cost(spec, cluster.workers)  # or a sentence that says what was calibrated
        if save is not None:
            from gradwire_lab.perf_model.calibration import save as keep

            keep(found, save)
        predictor = _predictor(cluster, overlap)
        barred = () if specs else tuple({*chosen} - {*free_of_losses(CANDIDATES)})
        advice = weigh(found, cluster, chosen, predictor, barred=barred)
    limit = _limit(found, cluster, advice, predictor)
    if as_json:
        typer.echo(json.dumps(as_object(found, cluster, advice, limit)))
        return
    words = Text(verdict(found, cluster, advice, limit))
    show(advice_table(found, cluster, advice, barred), words, width=160)


def _parted(text: str) -> list[str]:
    """Parted at commas that stand in no bracket, and, as for `compare`, at semicolons that no option follows."""
    parts, depth = [""], 0
    for at, sign in enumerate(text):
        depth += (sign in "({[") - (sign in ")}]")
        if depth == 0 and (sign == "," or (sign == ";" and not _OPTION.match(text, at + 1))):
            parts.append("")
        else:
            parts[-1] += sign
    return [part for part in parts if part.strip()]


def _cluster(
    workers: int | None,
    hosts: int | None,
    per_host: int | None,
    link: LinkSpec,
    inside: str,
    where: "LauncherRank | None",
) -> "Cluster":
    """As the person says, or as the ranks have been started. Those of a single host exchange among themselves."""
    from gradwire_lab.perf_model.cluster import Cluster

    each = per_host or (1 if where is None or where.local_world == where.world else where.local_world)
    if hosts is not None and workers not in (None, hosts * each):
        raise ValueError(f"{hosts} hosts of {each} are not {workers} workers; leave one of them out")
    usual = 4 * each if where is None else where.world
    count = hosts * each if hosts is not None else workers or usual
    if where is not None and count != where.world:
        raise ValueError(
            f"there are {where.world} ranks, and {count} workers are asked about; leave that out, or start this once, "
            "by itself, with --link"
        )
    if count < 2:
        raise ValueError("a single worker has nobody to send to; ask about 2 or more")
    return Cluster(count, link, each, LinkSpec.parse(inside))


def _link(text: str, where: "LauncherRank | None", patience: float) -> LinkSpec:
    """What the person says, or what the ranks that torchrun started find out."""
    if not 0 < patience <= _LONGEST_PATIENCE:
        raise ValueError(f"a probe cannot wait {patience:g} s; give --patience more than 0, and a day at most")
    if text:
        return LinkSpec.parse(text)
    if where is None:
        raise ValueError(
            "what is the link between the workers? Say --link 100mbit,5ms, or start this by torchrun on all hosts"
        )
    from gradwire_lab.launch import join_group
    from gradwire_lab.perf_model.probe import probe, unheard

    limit = timedelta(seconds=patience)
    try:
        with join_group(where, "gloo", limit, limit):
            found = probe(patience)
    except RuntimeError:  # somebody never came, and torch says so in many ways
        raise ValueError(unheard(patience)) from None
    typer.echo(f"rank {where.rank} of {where.world}: the link is about {found}", err=True)
    return found


class Wanted(NamedTuple):
    """What a person asks about."""

    recipes: list[str] | None
    model: str
    specs: tuple[str, ...]
    device: str
    dtype: str


def _read(path: Path) -> "Calibration":
    from gradwire_lab.perf_model.calibration import load

    return load(path)


def _figures(wanted: Wanted, cluster: "Cluster", beside: int, fresh: bool) -> "Calibration":
    """From the cache, or measured."""
    from gradwire_lab.bench.network import calibrate, calibration_cache, devices

    make, facts = _subject(wanted.recipes, wanted.model, cluster.workers)
    speakers = cluster.hosts if cluster.per_host > 1 else cluster.workers
    device = devices.parse(wanted.device)
    here = devices.facts(device, wanted.dtype)
    home = calibration_cache.place({**facts, **here, "specs": wanted.specs, "speakers": speakers, "beside": beside})
    found = None if fresh else calibration_cache.find(home)
    if found is None:
        job = calibrate.CalibrationJob(
            make, wanted.specs, speakers, seconds=_SECONDS, device=device, dtype=wanted.dtype
        )
        job = calibrate.checked(job)  # what is wrong with it is said here, and not by a rank
        typer.echo("measuring here; this takes some seconds", err=True)
        busy = calibration_cache.disturbance()
        found = calibrate.calibrate(job, beside)
        if busy:
            return replace(found, note=f"{found.note}, {busy}")
        calibration_cache.keep(found, home)
    return found


def _subject(recipes: list[str] | None, model: str, workers: int) -> "tuple[Callable[[], Workload], dict[str, str]]":
    """How to make the workload, and what its figures depend on."""
    if model and recipes:
        raise ValueError("give a recipe or --model, not both")
    if model:
        from gradwire_lab.bench.network import workloads

        return partial(workloads.load, model), {"model": model, "source": workloads.source(model)}
    from gradwire_lab.train.recipe_files import resolve

    recipe = resolve(recipes or ["digits"])
    return partial(recipe_workload, recipe, workers), {"recipe": recipe.model_dump_json(), "workers": str(workers)}


def recipe_workload(recipe: "Recipe", world: int) -> "Workload":
    """A step of a recipe, on a random batch of the shape that its data have."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    from gradwire_lab.bench.network.workloads import Workload
    from gradwire_lab.cli.plan import facts_of
    from gradwire_lab.train.loading import batch_of, recurrent
    from gradwire_lab.train.models import build

    facts = facts_of(recipe, world)
    model = build(recipe.model.name, recipe.model.options, facts, seed=0)
    batch = batch_of(recipe, world)
    if "vocab" in facts:
        tokens = torch.randint(int(facts["vocab"]), (batch, recipe.data.length + 1))  # type: ignore[call-overload]
        inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    else:
        side = int(facts.get("size", recipe.data.size))  # type: ignore[call-overload]
        inputs = torch.randn(batch, int(facts.get("channels", 3)), side, side)  # type: ignore[call-overload]
        targets = torch.randint(int(facts["classes"]), (batch,))  # type: ignore[call-overload]
    state = model.start(batch) if recurrent(model) else None  # type: ignore[operator]

    def loss(run: nn.Module) -> Tensor:
        logits = run(inputs) if state is None else run(inputs, state)[0]
        return F.cross_entropy(logits.flatten(0, -2), targets)

    return Workload(model, loss)


def _predictor(cluster: "Cluster", overlap: bool) -> "Predict":
    from gradwire_lab.perf_model.costs import predict, predict_across

    way = predict_across if cluster.per_host > 1 else predict

    def predicted(calibration: "Calibration", spec: str, place: "Cluster") -> "Prediction":
        return way(calibration, spec, place, overlap)

    return predicted


def _limit(
    found: "Calibration", cluster: "Cluster", advice: "Advice", predictor: "Predict"
) -> "tuple[str, RateRange | None]":
    """The way to ask about, and the rates at which it pays."""
    from gradwire_lab.perf_model.break_even import break_even

    way = advice.choice if advice.compresses else advice.runner_up or advice.fastest
    return way.spec, break_even(found, cluster, way.spec, predictor)
