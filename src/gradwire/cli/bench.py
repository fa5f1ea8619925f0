"""`gradwire bench`: how fast kernels are here, and steps over thin links."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from gradwire.links.rates import LinkSpec
from gradwire.network.namespaces import Refused

if TYPE_CHECKING:
    from gradwire.bench.network.cells import Field, Where
    from gradwire.bench.network.contest import Tell
    from gradwire.bench.network.standings import Standing

app = typer.Typer(help="Measure, on this machine.", no_args_is_help=True)

COLUMNS = ("kernel", "elements", "segments", "ms", "GB/s", "x floor", "x plain torch")


@app.callback()
def bench() -> None:
    """Measure, on this machine."""


@app.command()
def kernels(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    size: Annotated[list[int] | None, typer.Option(help="Elements; several may be given. By default 25.6 M.")] = None,
    resnet50: Annotated[
        bool, typer.Option("--resnet50", help="ResNet-50's weight tensors too, layer by layer.")
    ] = False,
    only: Annotated[str, typer.Option(help="Only kernels whose name holds this.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Medians are of this many runs.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")] = False,
) -> None:
    """Time every kernel against the memory it must touch, and against its definition in plain torch."""
    from gradwire.bench import kernels as bench_kernels

    sizes: list[int | tuple[int, ...]] = list(size or [25_600_000])
    sizes += [bench_kernels.resnet50()] if resnet50 else []
    if as_json:
        bench_kernels.measure(device, sizes, only, repeats, lambda row: typer.echo(json.dumps(row)))
        return
    table = Table(title=f"kernels on {device}: the floor is a copy of as many bytes, in the same run")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "kernel" else "right")
    bench_kernels.measure(device, sizes, only, repeats, lambda row: table.add_row(*_cells(row)))
    Console().print(table)


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(row["kernel"]),
        f"{row['n']:,}",
        str(row["segments"]),
        f"{row['ms']:.3f}",
        f"{row['gb_per_s']:.1f}",
        f"{row['to_floor']:.2f}",
        f"{row['to_reference']:.1f}",
    )


@app.command()
def network(
    model: Annotated[list[str] | None, typer.Option(help="lstm, resnet20, gpt, or mine.py:make; several.")] = None,
    link: Annotated[list[str] | None, typer.Option(help="10mbit, 100mbit,20ms, unshaped, ...; several.")] = None,
    workers: Annotated[list[int] | None, typer.Option(min=2, help="How many ranks; several.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="ddp-fp32, 'topk(0.01) | sign', ...; several.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each method, interleaved.")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="Of one turn.")] = 12,
    turn: Annotated[float, typer.Option(help="Seconds that a turn should not exceed; it has two steps at least.")] = 20,
    timeout: Annotated[float, typer.Option(help="Seconds of a turn after which a method is given up.")] = 300,
    out: Annotated[Path | None, typer.Option(help="JSONL to append to; what it holds is not measured again.")] = None,
    throttled: Annotated[
        bool, typer.Option("--throttled", help="On a link that pretends, also where hosts could be made.")
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw the multiples into this PNG or SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")] = False,
) -> None:
    """Time the same training step over shaped links, by torch's methods and ours.

    As root, every rank is a host of its own, in a network namespace; otherwise, ranks share a link that pretends.
    """
    from gradwire.bench.network import cells, contest, contestants, standings

    methods = method or list(contestants.ALL)
    pace = cells.Pace(rounds, steps, turn_seconds=turn, timeout=timeout)
    where = _where(throttled)
    rows = cells.read(out)
    try:
        for name in methods:
            contestants.check(name)
        named = [str(LinkSpec.parse(text)) for text in link or ("unshaped", "1gbit", "100mbit", "10mbit")]
        chosen = list(cells.fields(model or ["lstm"], named, workers or [2, 4, 8], where))
        for field in chosen:
            for row in contest.hold(field, cells.missing(field, methods, rows), pace, _tell(field)):
                cells.append(out, row)
                rows.append(row)
    except (ValueError, Refused) as wrong:
        typer.echo(f"gradwire bench network: {wrong}", err=True)
        raise typer.Exit(2) from None
    wanted = {field.key(name) for field in chosen for name in methods}
    found = standings.standings([row for row in rows if cells.key_of(row) in wanted])
    if picture:
        standings.picture(found, picture)
    if as_json:
        for one in found:
            typer.echo(json.dumps(one.row | {"multiple": one.multiple, "speedup": one.speedup, "honest": one.honest}))
        return
    _show(found)


def _where(throttled: bool) -> "Where":
    from gradwire.network.namespaces import lacking

    missing = lacking()
    if missing and not throttled:
        typer.echo(f"{missing}; measuring with links that pretend instead", err=True)
    return "throttled" if throttled or missing else "hosts"


def _tell(field: "Field") -> "Tell":
    return lambda line: typer.echo(f"{field.model}, {field.link}, {field.world} ranks, {line}", err=True)


def _show(found: "list[Standing]") -> None:
    from gradwire.bench.network.standings import COLUMNS as columns
    from gradwire.bench.network.standings import words

    table = Table(title="silent: the same step without communication; dense: the better of torch's fp32 and 16 bits")
    for column in columns:
        table.add_column(column, justify="left" if column in ("model", "link", "method") else "right")
    for one in found:
        table.add_row(*words(one))
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    for one in found:
        if "failed" in one.row:
            typer.echo(f"{one.row['link']}, {one.row['world']} ranks, {one.row['method']}: {one.row['failed']}")
