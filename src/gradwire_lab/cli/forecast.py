"""``gradwire bench forecast``: predicted steps beside measured ones."""

from pathlib import Path
from typing import Annotated

import typer

from gradwire_lab.bench.network import grid
from gradwire_lab.bench.network.prediction_error import REGRET, TOLERANCE, ChoiceComparison, StepComparison, compare
from gradwire_lab.cli.output import make_table, refusing, show
from gradwire_lab.network.namespaces import HostsUnavailableError


def forecast(
    results: Annotated[Path, typer.Argument(help="What bench network --out wrote.")],
    out: Annotated[Path | None, typer.Option(help="JSONL of every comparison.")] = None,
) -> None:
    """Compare the steps that advise predicts with those that bench network measured; calibrates first, so be quiet."""
    with refusing("bench forecast", ValueError, HostsUnavailableError):
        rows = grid.read(results)
        if not rows:
            raise ValueError(f"{results} holds no results; make some with `gradwire bench network --out {results}`")
        found = list(compare(rows, lambda line: typer.echo(line, err=True)))
    for one in found:
        grid.append(out, one.as_row())
    steps = [one for one in found if isinstance(one, StepComparison)]
    columns = ("model", "link", "ranks", "method", "measured", "predicted", "error")
    table = make_table("milliseconds of a step", columns, ("model", "link", "method"))
    for one in steps:
        row = one.row
        numbers = (f"{1e3 * one.measured:,.1f}", f"{1e3 * one.predicted:,.1f}", f"{one.error:+.0%}")
        table.add_row(row["model"], row["link"], str(row["world"]), row["method"], *numbers)
    show(table)
    near = sum(abs(one.error) <= TOLERANCE for one in steps)
    typer.echo(f"{near} of {len(steps)} within {TOLERANCE:.0%}")
    for pick in (one for one in found if isinstance(one, ChoiceComparison)):
        right = "" if pick.regret <= REGRET else ", too far"
        typer.echo(
            f"{pick.model}, {pick.link}, {pick.world} ranks, {'by accuracy too' if pick.sound else 'by speed'}: "
            f"advice takes {pick.choice}, best was {pick.best}, {pick.regret:+.0%}{right}"
        )
