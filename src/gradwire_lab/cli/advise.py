"""``gradwire advise``: whether to compress, and how, on a link that is described or probed."""

import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwire.comm.rates import FASTEST_BITS, SLOWEST_BITS, LinkSpec

if TYPE_CHECKING:
    from gradwire_lab.bench.network.workloads import Workload
    from gradwire_lab.perf_model.advice import Advice, Predict
    from gradwire_lab.perf_model.break_even import Span
    from gradwire_lab.perf_model.calibration import Calibration
    from gradwire_lab.perf_model.cluster import Cluster
    from gradwire_lab.perf_model.costs import Prediction
    from gradwire_lab.train.recipe import Recipe
    from gradwire_lab.train.standing import Standing

_SECONDS = 6.0  # to be spent on rehearsals, unless single ones take longer
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
    from gradwire_lab.perf_model.advice import advise as weigh
    from gradwire_lab.perf_model.candidates import CANDIDATES, PRESETS, arguments
    from gradwire_lab.perf_model.evidence import sound
    from gradwire_lab.perf_model.model import Model
    from gradwire_lab.train.launch import RankError
    from gradwire_lab.train.standing import standing

    try:
        chosen = tuple(part.strip() for part in _parted(specs)) or (*CANDIDATES, *PRESETS)
        for spec in chosen:
            method(arguments(spec)[0])
        where = standing(os.environ)
        cluster = _cluster(workers, hosts, per_host, _link(link, where, patience), inside, where)
        if where is not None and where.rank:  # another one speaks
            return
        beside = sharing or (cluster.per_host if where is None else where.beside)
        wanted = Wanted(recipes, model, chosen, device, dtype)
        if dtype:
            Model({}, dtype=dtype)  # or a sentence that says which there are
        found = _figures(wanted, cluster, beside, fresh) if calibration is None else _read(calibration)
        found = replace(found, model=replace(found.model, dtype=dtype or found.model.dtype))
        for spec in chosen if specs else ():
            found.cost(spec, cluster.workers)  # or a sentence that says what was calibrated
        if save is not None:
            from gradwire_lab.perf_model.calibration import save as keep

            keep(found, save)
        predictor = _predictor(cluster, overlap)
        barred = () if specs else tuple({*chosen} - {*sound(CANDIDATES)})
        advice = weigh(found, cluster, chosen, predictor, barred=barred)
    except (ValueError, TypeError) as wrong:
        typer.echo(f"gradwire advise: {wrong}", err=True)
        raise typer.Exit(2) from None
    except RankError as wrong:
        typer.echo(f"gradwire advise: {wrong}", err=True)
        raise typer.Exit(1) from None
    limit = _limit(found, cluster, advice, predictor)
    if as_json:
        typer.echo(json.dumps(_object(found, cluster, advice, limit)))
        return
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(_table(found, cluster, advice, barred))
    console.print(Text(_verdict(found, cluster, advice, limit)))


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
    workers: int | None, hosts: int | None, per_host: int | None, link: LinkSpec, inside: str, where: "Standing | None"
) -> "Cluster":
    """As the person says, or as the ranks have been started. Those of a single host exchange among themselves."""
    from gradwire_lab.perf_model.cluster import Cluster

    each = per_host or (1 if where is None or where.beside == where.world else where.beside)
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


def _link(text: str, where: "Standing | None", patience: float) -> LinkSpec:
    """What the person says, or what the ranks that torchrun started find out."""
    if not 0 < patience <= _LONGEST_PATIENCE:
        raise ValueError(f"a probe cannot wait {patience:g} s; give --patience more than 0, and a day at most")
    if text:
        return LinkSpec.parse(text)
    if where is None:
        raise ValueError(
            "what is the link between the workers? Say --link 100mbit,5ms, or start this by torchrun on all hosts"
        )
    from gradwire_lab.perf_model.probe import probe, unheard
    from gradwire_lab.train.launch import joined

    limit = timedelta(seconds=patience)
    try:
        with joined(where, "gloo", limit, limit):
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
    """What the drawer says, or measuring."""
    from gradwire_lab.bench.network import calibrate, devices, drawer

    make, facts = _subject(wanted.recipes, wanted.model, cluster.workers)
    speakers = cluster.hosts if cluster.per_host > 1 else cluster.workers
    device = devices.parse(wanted.device)
    here = devices.facts(device, wanted.dtype)
    home = drawer.place({**facts, **here, "specs": wanted.specs, "speakers": speakers, "beside": beside})
    found = None if fresh else drawer.find(home)
    if found is None:
        job = calibrate.Job(make, wanted.specs, speakers, seconds=_SECONDS, device=device, dtype=wanted.dtype)
        job = calibrate.checked(job)  # what is wrong with it is said here, and not by a rank
        typer.echo("measuring here; this takes some seconds", err=True)
        busy = drawer.disturbance()
        found = calibrate.calibrate(job, beside)
        if busy:
            return replace(found, note=f"{found.note}, {busy}")
        drawer.keep(found, home)
    return found


def _subject(recipes: list[str] | None, model: str, workers: int) -> "tuple[Callable[[], Workload], dict[str, str]]":
    """How to make the workload, and what its figures depend on."""
    if model and recipes:
        raise ValueError("give a recipe or --model, not both")
    if model:
        from gradwire_lab.bench.network import workloads

        return partial(workloads.load, model), {"model": model, "source": workloads.source(model)}
    from gradwire_lab.train.shelf import resolve

    recipe = resolve(recipes or ["digits"])
    return partial(recipe_workload, recipe, workers), {"recipe": recipe.model_dump_json(), "workers": str(workers)}


def recipe_workload(recipe: "Recipe", world: int) -> "Workload":
    """A step of a recipe, on a random batch of the shape that its data have."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    from gradwire_lab.bench.network.workloads import Workload
    from gradwire_lab.cli.plan import facts_of
    from gradwire_lab.train.feed import batch_of, recurrent
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
) -> "tuple[str, Span | None]":
    """The way to ask about, and the rates at which it pays."""
    from gradwire_lab.perf_model.break_even import break_even

    way = advice.choice if advice.compresses else advice.runner_up or advice.fastest
    return way.spec, break_even(found, cluster, way.spec, predictor)


# -- what is shown -----------------------------------------------------------------------------------------------------


def _table(found: "Calibration", cluster: "Cluster", advice: "Advice", barred: Sequence[str]) -> Table:
    place = f"{cluster.workers} workers" + (f" on {cluster.hosts} hosts" if cluster.per_host > 1 else "")
    title = f"{found.model.elements:,} parameters, {place}, link {cluster.link}; milliseconds of a step, predicted"
    table = Table(title=title, title_justify="left")
    for column in ("", "step", "compute", "encode", "wire", "decode", "hidden", "sent", "accuracy against dense"):
        table.add_column(column, justify="left" if column in ("", "accuracy against dense") else "right")
    for way in advice.ways:
        split = way.split
        parts = (split.step, split.compute, split.encode, split.wire, split.decode, split.hidden)
        name = Text(found.model.called(way.spec), style="bold" if way.spec == advice.choice.spec else "")
        known = ("not taken: " if way.spec in barred else "") + _known(way.spec)
        table.add_row(name, *(f"{1e3 * part:,.1f}" for part in parts), _bytes(way.sent), known)
    table.caption = f"{found.note}. step = compute + encode + wire + decode - hidden"
    table.caption_justify = "left"
    return table


def _known(spec: str) -> str:
    from gradwire_lab.perf_model.evidence import evidence, sound
    from gradwire_lab.perf_model.model import DENSE

    if spec in DENSE:
        return ""
    doubt = "" if sound([spec]) else "lost accuracy: "
    return doubt + ("; ".join(map(str, evidence(spec))) or "no evidence yet")


def _verdict(found: "Calibration", cluster: "Cluster", advice: "Advice", limit: "tuple[str, Span | None]") -> str:
    dense = found.model.called(advice.dense.spec).removeprefix("ddp-")
    if not advice.compresses:
        said = f"Stay with {dense} DDP: {_ms(advice.dense.seconds)} a step."
        if advice.tempting is not None:
            said += (
                f" {advice.tempting.spec} would take {_ms(advice.tempting.seconds)}, if all figures were exact; they "
                "are trusted to 15 %."
            )
        return f"{said} {_until(*limit)}"
    choice = advice.choice
    return (
        f"Take {choice.spec}: {_ms(choice.seconds)} a step, {advice.speedup:.2g} times faster than {dense} DDP "
        f"({_ms(advice.dense.seconds)}), which is the better dense one. {_until(*limit)}\n"
        f"Accuracy: {_known(choice.spec)}\n"
        f"wire = gradwire.compress(model, {_arguments(choice, cluster)})"
    )


def _arguments(choice: "Prediction", cluster: "Cluster") -> str:
    """What `gradwire.compress` is told, in Python."""
    from gradwire.engine.plan import LAUNCH_BYTES
    from gradwire_lab.perf_model.candidates import arguments

    spec, options = arguments(choice.spec)
    told: dict[str, Any] = {**options, "across": "hosts"} if cluster.per_host > 1 else dict(options)
    if choice.launch_bytes != LAUNCH_BYTES:
        told["launch_mb"] = choice.launch_bytes // 2**20
    quoted = json.dumps(spec)
    return ", ".join([quoted, *(f"{key}={json.dumps(value) if value else value}" for key, value in told.items())])


def _until(spec: str, span: "Span | None") -> str:
    if span is None:
        return f"{spec} would not pay on any link."
    low, high = (LinkSpec(float(f"{bits:.2g}")) for bits in span)
    if span.low > SLOWEST_BITS:
        return f"{spec} pays on links above {low}" + (f" and below {high}." if span.high < FASTEST_BITS else ".")
    return f"{spec} pays on links below {high}." if span.high < FASTEST_BITS else f"{spec} pays on any link."


def _paying(spec: str, span: "Span | None") -> dict[str, Any]:
    low, high = span or (None, None)
    return {"spec": spec, "bits_per_second": high, "from_bits_per_second": low}


def _object(
    found: "Calibration", cluster: "Cluster", advice: "Advice", limit: "tuple[str, Span | None]"
) -> dict[str, Any]:
    from gradwire_lab.perf_model.evidence import evidence
    from gradwire_lab.perf_model.model import DENSE

    return {
        "link": str(cluster.link),
        "workers": cluster.workers,
        "per_host": cluster.per_host,
        "parameters": found.model.elements,
        "dtype": found.model.dtype,
        "note": found.note,
        "choice": found.model.called(advice.choice.spec),
        "compresses": advice.compresses,
        "dense": found.model.called(advice.dense.spec),
        "speedup": advice.speedup,
        "break_even": _paying(*limit),
        "ways": [
            {
                "spec": found.model.called(way.spec),
                "seconds": way.seconds,
                **asdict(way.split),
                "hidden": way.split.hidden,
                "sent": way.sent,
                "collectives": way.collectives,
                "launch_bytes": way.launch_bytes,
                "evidence": [] if way.spec in DENSE else [asdict(one) for one in evidence(way.spec)],
            }
            for way in advice.ways
        ],
    }


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:,.3g} s"


def _bytes(n: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:,.3g} GB"
