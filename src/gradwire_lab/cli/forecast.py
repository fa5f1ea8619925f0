"""``gradwire bench forecast``: predicted steps beside measured ones."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from gradwire_lab.network.namespaces import Refused


def forecast(
    results: Annotated[Path, typer.Argument(help="What bench network --out wrote.")],
    out: Annotated[Path | None, typer.Option(help="JSONL of every comparison.")] = None,
) -> None:
    """Compare the steps that advise predicts with those that bench network measured; calibrates first, so be quiet."""
    from gradwire_lab.bench.network import cells
    from gradwire_lab.bench.network.forecasts import REGRET, TOLERANCE, Compared, Picked, compare

    try:
        rows = cells.read(results)
        if not rows:
            raise ValueError(f"{results} holds no results; make some with `gradwire bench network --out {results}`")
        found = list(compare(rows, lambda line: typer.echo(line, err=True)))
    except (ValueError, Refused) as wrong:
        typer.echo(f"gradwire bench forecast: {wrong}", err=True)
        raise typer.Exit(2) from None
    for one in found:
        cells.append(out, one.told())
    steps = [one for one in found if isinstance(one, Compared)]
    table = Table(title="milliseconds of a step")
    for column in ("model", "link", "ranks", "method", "measured", "predicted", "error"):
        table.add_column(column, justify="left" if column in ("model", "link", "method") else "right")
    for one in steps:
        row = one.row
        numbers = (f"{1e3 * one.measured:,.1f}", f"{1e3 * one.predicted:,.1f}", f"{one.error:+.0%}")
        table.add_row(row["model"], row["link"], str(row["world"]), row["method"], *numbers)
    Console(width=None if sys.stdout.isatty() else 150).print(table)
    near = sum(abs(one.error) <= TOLERANCE for one in steps)
    typer.echo(f"{near} of {len(steps)} within {TOLERANCE:.0%}")
    for pick in (one for one in found if isinstance(one, Picked)):
        right = "" if pick.regret <= REGRET else ", too far"
        typer.echo(
            f"{pick.model}, {pick.link}, {pick.world} ranks, {'by accuracy too' if pick.sound else 'by speed'}: "
            f"advice takes {pick.choice}, best was {pick.best}, {pick.regret:+.0%}{right}"
        )
