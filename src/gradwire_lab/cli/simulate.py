"""``gradwire simulate``: the calibrated costs on clusters from 8 to 4096 workers, as a page and as JSONL."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from gradwire_lab.cli.output import needing_charts, refusing
from gradwire_lab.cli.simulated_models import simulated_models
from gradwire_lab.perf_model.calibration import load
from gradwire_lab.perf_model.cluster import Algorithm
from gradwire_lab.perf_model.simulation import INSIDE, LINKS, WORKERS, SimulatedModel, SimulationPoint, grid, judge
from gradwire_lab.perf_model.stragglers import Stragglers
from gradwire_lab.train.time_left import TimeLeft

_ASSUMED = (
    "Compression costs are lines through kernels timed on one H200; those of low-rank products, and the speed of the "
    "models, are assumed."
)
_MARKED = "Marked dense: compression loses there."


def simulate(
    output: Annotated[Path, typer.Option("--output", "-o", help="The file of the page.")] = Path("simulation.html"),
    rows: Annotated[Path, typer.Option(help="The file of all cells, one JSON object a line.")] = Path(
        "simulation.jsonl"
    ),
    workers: Annotated[
        list[int] | None, typer.Option(min=2, help="Number of workers. May be repeated; by default 8, 64, 512, 4096.")
    ] = None,
    link: Annotated[
        list[str] | None, typer.Option(help="Link between hosts: 1gbit,500us. May be repeated; by default five.")
    ] = None,
    per_host: Annotated[
        int, typer.Option(min=1, help="Workers of a host in the hierarchical grid; 1 leaves it out.")
    ] = 8,
    inside: Annotated[str, typer.Option(help="Link between workers of a host; by default an H200's NVLink.")] = "",
    algorithm: Annotated[str, typer.Option(help="Algorithm of sums and gathers: ring, tree or best.")] = "best",
    calibration: Annotated[
        Path | None, typer.Option(help="A model measured by advise --save, instead of the five assumed ones.")
    ] = None,
    jitter: Annotated[float, typer.Option(help="Spread of a worker's computing time, as a share of it.")] = 0.0,
    stragglers: Annotated[float, typer.Option(help="Share of a worker's steps that are slow.")] = 0.0,
    slowdown: Annotated[float, typer.Option(help="How many times slower those steps are.")] = 2.0,
    seed: Annotated[int, typer.Option(help="Seed of jitter and stragglers.")] = 0,
) -> None:
    """Predict what auto would gain on simulated clusters, and where compression loses."""
    with refusing("simulate", ValueError, OSError), needing_charts("simulate"):
        for path in (output, rows):
            if path.is_dir():
                raise ValueError(f"{path} is a folder; name a file")
        if algorithm not in get_args(Algorithm):
            raise ValueError(f"there is no algorithm {algorithm!r}; take ring, tree or best")
        uneven = Stragglers(jitter, stragglers, slowdown, seed)
        models = _models(calibration)
        places = {"flat": (workers or WORKERS, 1)}
        if per_host > 1:
            named = f"hierarchical, {per_host} workers to a host"
            places[named] = (_several(workers or WORKERS, per_host), per_host)
        left = TimeLeft(len(models) * len(link or LINKS) * sum(len(counts) for counts, _ in places.values()))
        grids = {
            place: [
                _judged(cell, uneven, left)
                for cell in grid(models, counts, link or LINKS, each, cast(Algorithm, algorithm), inside or INSIDE)
            ]
            for place, (counts, each) in places.items()
        }
        measured = models[0].measured
        source = _ASSUMED if measured is None else f"Computing and compressing: {measured.note}."
        _write(grids, f"{source} {_MARKED}", output, rows)


def _judged(cell: SimulationPoint, uneven: Stragglers, left: TimeLeft) -> dict[str, Any]:
    row = judge(cell, uneven)
    left.finish()
    if left.done % max(1, left.total // 10) == 0 and left.text:
        typer.echo(f"{left.done} of {left.total} cells, {left.text}", err=True)
    return row


def _several(workers: Sequence[int], per_host: int) -> list[int]:
    """Workers of a hierarchical grid, each number once: a hierarchy needs two hosts at least."""
    few = [count for count in workers if count < 2 * per_host]
    if few:
        names = " and ".join(map(str, few))
        typer.echo(
            f"{names} workers are not two hosts of {per_host}; the hierarchical grid begins at {2 * per_host}", err=True
        )
    return list(dict.fromkeys(max(count, 2 * per_host) for count in workers))


def _models(path: Path | None) -> tuple[SimulatedModel, ...]:
    if path is None:
        return simulated_models()
    found = load(path)
    return (SimulatedModel(path.stem, "as measured", found.model, found.compute, found.note, found),)


def _write(places: dict[str, list[dict[str, Any]]], note: str, output: Path, rows: Path) -> None:
    from gradwire_lab.report.simulation import page

    text = page(places, note)
    for path in (output, rows):
        path.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"place": place, **row}) for place, cells in places.items() for row in cells]
    rows.write_text("\n".join(lines) + "\n", encoding="utf-8")
    output.write_text(text, encoding="utf-8")
    for place, cells in places.items():
        lost = sum(row["compression_loses"] for row in cells)
        gained = sum(row["speedup"] >= 1.2 for row in cells)
        typer.echo(f"{place}: {len(cells)} cells, 1.2 times faster or more in {gained}, compression loses in {lost}")
    typer.echo(f"{output}: {len(text.encode()) / 1e6:.2f} MB, opens in any browser; {rows}: {len(lines)} lines")
