"""``gradwire advise``: whether to compress, and how, on a link that is described or probed."""

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from gradwire.links.rates import FASTEST_BITS, SLOWEST_BITS, LinkSpec

if TYPE_CHECKING:
    from gradwire.bench.network.workloads import Workload
    from gradwire.forecast.advice import Advice, Predict, Span
    from gradwire.forecast.calibration import Calibration
    from gradwire.forecast.cluster import Cluster
    from gradwire.forecast.costs import Prediction
    from gradwire.train.recipe import Recipe

# Whatever imports torch is imported where it is used: help and refusals should not wait for it.


def advise(
    recipes: Annotated[list[str] | None, typer.Argument(help="A recipe and fragments; or give --model.")] = None,
    model: Annotated[str, typer.Option(help="lstm, resnet20, gpt, or mine.py:make, as for bench network.")] = "",
    workers: Annotated[int | None, typer.Option(min=2, help="How many; or give --hosts and --per-host.")] = None,
    link: Annotated[str, typer.Option(help="Between hosts: 100mbit,5ms. Under torchrun it may be probed.")] = "",
    hosts: Annotated[int | None, typer.Option(min=1, help="How many.")] = None,
    per_host: Annotated[int, typer.Option(min=1, help="Workers of a host; gradients are added up there first.")] = 1,
    inside: Annotated[str, typer.Option(help="The link between workers of a host.")] = "unshaped",
    sharing: Annotated[
        int | None, typer.Option(min=1, help="Workers that share a machine's cores, measured so; else --per-host.")
    ] = None,
    specs: Annotated[str, typer.Option(help="What to weigh, parted by commas; else all candidates.")] = "",
    calibration: Annotated[Path | None, typer.Option(help="Figures that --save wrote, instead of measuring.")] = None,
    save: Annotated[Path | None, typer.Option(help="Write the figures to a file.")] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again, though figures are kept.")] = False,
    overlap: Annotated[bool, typer.Option(help="As under DDP: messages leave during the backward pass.")] = True,
    patience: Annotated[float, typer.Option(help="Seconds that a probe waits for other ranks.")] = 10.0,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object instead of a table.")] = False,
) -> None:
    """Say whether compression pays, which spec to take, and what to expect of it.

    Specs that lost more than a percent in the project's own trainings are shown, but taken only if --specs names them.
    Computing and compressing are measured here. The link is what --link says; started by torchrun on all hosts without
    it, a short probe between the ranks tells.
    """
    from gradwire.forecast.advice import advise as weigh
    from gradwire.forecast.candidates import CANDIDATES, arguments
    from gradwire.forecast.evidence import sound
    from gradwire.sync import method
    from gradwire.train.launch import RankError

    try:
        chosen = tuple(part.strip() for part in _parted(specs)) or CANDIDATES
        for spec in chosen:
            method(arguments(spec)[0])
        described = _link(link, patience)
        if described is None:  # another rank speaks
            return
        cluster = _cluster(workers, hosts, per_host, described, inside)
        found = _figures(recipes, model, cluster, sharing, chosen, calibration, fresh)
        if save is not None:
            from gradwire.forecast.calibration import save as keep

            keep(found, save)
        predictor = _predictor(cluster, overlap)
        barred = () if specs else tuple(set(chosen) - set(sound(chosen)))
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
    console.print(_table(found, cluster, advice))
    console.print(Text(_verdict(found, cluster, advice, limit)))


def _parted(text: str) -> list[str]:
    """Parted at commas that stand in no bracket."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part for part in parts if part.strip()]


def _cluster(workers: int | None, hosts: int | None, per_host: int, link: LinkSpec, inside: str) -> "Cluster":
    from gradwire.forecast.cluster import Cluster

    if hosts is not None and workers not in (None, hosts * per_host):
        raise ValueError(f"{hosts} hosts of {per_host} are not {workers} workers; leave one of them out")
    count = hosts * per_host if hosts is not None else workers or 4 * per_host
    return Cluster(count, link, per_host, LinkSpec.parse(inside))


def _link(text: str, patience: float) -> LinkSpec | None:
    """What the person says, or what the ranks that torchrun started find out; None for ranks that need not speak."""
    if text:
        return LinkSpec.parse(text)
    from gradwire.train.standing import standing

    where = standing(os.environ)
    if where is None:
        raise ValueError(
            "what is the link between the workers? Say --link 100mbit,5ms, or start this by torchrun on all hosts"
        )
    from gradwire.forecast.probe import probe
    from gradwire.train.launch import joined

    with joined(where, "gloo"):
        found = probe(patience)
    typer.echo(f"rank {where.rank} of {where.world}: the link is about {found}", err=True)
    return found if where.rank == 0 else None


def _figures(
    recipes: list[str] | None,
    model: str,
    cluster: "Cluster",
    sharing: int | None,
    specs: tuple[str, ...],
    path: Path | None,
    fresh: bool,
) -> "Calibration":
    """What a file says, or the drawer, or measuring."""
    if path is not None:
        from gradwire.forecast.calibration import load

        return load(path)
    from gradwire.bench.network import drawer
    from gradwire.bench.network.calibrate import Job, calibrate

    make, facts = _subject(recipes, model, cluster.workers)
    speakers = cluster.hosts if cluster.per_host > 1 else cluster.workers
    beside = sharing or cluster.per_host
    home = drawer.place({**facts, "specs": specs, "speakers": speakers, "beside": beside})
    found = None if fresh else drawer.find(home)
    if found is None:
        make()  # what is wrong with it is said here, and not by a rank
        typer.echo("measuring here; this takes some seconds", err=True)
        found = calibrate(Job(make, specs, speakers), beside)
        drawer.keep(found, home)
    return found


def _subject(recipes: list[str] | None, model: str, workers: int) -> "tuple[Callable[[], Workload], dict[str, str]]":
    """How to make the workload, and what its figures depend on."""
    if model and recipes:
        raise ValueError("give a recipe or --model, not both")
    if model:
        from gradwire.bench.network import workloads

        return partial(workloads.load, model), {"model": model, "source": workloads.source(model)}
    from gradwire.train.shelf import resolve

    recipe = resolve(recipes or ["digits"])
    return partial(recipe_workload, recipe, workers), {"recipe": recipe.model_dump_json(), "workers": str(workers)}


def recipe_workload(recipe: "Recipe", world: int) -> "Workload":
    """A step of a recipe, on a random batch of the shape that its data have."""
    import torch
    from torch import Tensor, nn
    from torch.nn import functional as F

    from gradwire.bench.network.workloads import Workload
    from gradwire.cli.plan import facts_of
    from gradwire.train.feed import batch_of, recurrent
    from gradwire.train.models import build

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
    from gradwire.forecast.costs import predict, predict_across

    way = predict_across if cluster.per_host > 1 else predict

    def predicted(calibration: "Calibration", spec: str, place: "Cluster") -> "Prediction":
        return way(calibration, spec, place, overlap)

    return predicted


def _limit(
    found: "Calibration", cluster: "Cluster", advice: "Advice", predictor: "Predict"
) -> "tuple[str, Span | None]":
    """The way to ask about, and the rates at which it pays."""
    from gradwire.forecast.advice import break_even

    way = advice.choice if advice.compresses else advice.runner_up or advice.fastest
    return way.spec, break_even(found, cluster, way.spec, predictor)


# -- what is shown -----------------------------------------------------------------------------------------------------


def _table(found: "Calibration", cluster: "Cluster", advice: "Advice") -> Table:
    place = f"{cluster.workers} workers" + (f" on {cluster.hosts} hosts" if cluster.per_host > 1 else "")
    title = f"{found.model.elements:,} parameters, {place}, link {cluster.link}; milliseconds of a step, predicted"
    table = Table(title=title, title_justify="left")
    for column in ("", "step", "compute", "encode", "wire", "decode", "hidden", "sent", "accuracy against dense"):
        table.add_column(column, justify="left" if column in ("", "accuracy against dense") else "right")
    for way in advice.ways:
        split = way.split
        parts = (split.step, split.compute, split.encode, split.wire, split.decode, split.hidden)
        name = Text(way.spec, style="bold" if way is advice.choice or way.spec == advice.choice.spec else "")
        table.add_row(name, *(f"{1e3 * part:,.1f}" for part in parts), _bytes(way.sent), _known(way.spec))
    table.caption = f"{found.note}. step = compute + encode + wire + decode - hidden"
    table.caption_justify = "left"
    return table


def _known(spec: str) -> str:
    from gradwire.forecast.evidence import evidence, sound
    from gradwire.forecast.model import DENSE

    if spec in DENSE:
        return ""
    doubt = "" if sound([spec]) else "not taken: "
    return doubt + ("; ".join(map(str, evidence(spec))) or "no evidence yet")


def _verdict(found: "Calibration", cluster: "Cluster", advice: "Advice", limit: "tuple[str, Span | None]") -> str:
    dense = advice.dense.spec.removeprefix("ddp-")
    if not advice.compresses:
        said = f"Stay with {dense} DDP: {_ms(advice.dense.seconds)} a step."
        if advice.tempting is not None:
            said += (
                f" {advice.tempting.spec} would take {_ms(advice.tempting.seconds)}, if all figures were exact; they "
                "are trusted to 15 %."
            )
        return f"{said} {_until(*limit)}"
    choice = advice.choice
    launch = "" if choice.launch_bytes == 25 * 2**20 else f", launch_mb={choice.launch_bytes / 2**20:g}"
    hosts = ', across="hosts"' if cluster.per_host > 1 else ""
    return (
        f"Take {choice.spec}: {_ms(choice.seconds)} a step, {advice.speedup:.2g} times faster than {dense} DDP "
        f"({_ms(advice.dense.seconds)}), which is the better dense one. {_until(*limit)}\n"
        f"Accuracy: {_known(choice.spec)}\n"
        f'wire = gradwire.compress(model, "{choice.spec}"{hosts}{launch})'
    )


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
    from gradwire.forecast.evidence import evidence
    from gradwire.forecast.model import DENSE

    return {
        "link": str(cluster.link),
        "workers": cluster.workers,
        "per_host": cluster.per_host,
        "parameters": found.model.elements,
        "note": found.note,
        "choice": advice.choice.spec,
        "compresses": advice.compresses,
        "dense": advice.dense.spec,
        "speedup": advice.speedup,
        "break_even": _paying(*limit),
        "ways": [
            {
                "spec": way.spec,
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
    return f"{1e3 * seconds:,.3g} ms" if seconds < 10 else f"{seconds:,.3g} s"


def _bytes(n: float) -> str:
    for unit in ("B", "kB", "MB"):
        if n < 1000:
            return f"{n:.3g} {unit}"
        n /= 1000
    return f"{n:,.3g} GB"
