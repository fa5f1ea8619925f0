"""``gradwire bench network``, ``link`` and ``forecast``: steps over shaped, emulated and computed links."""

import os
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from gradwire.comm.backend import SingleBackend
from gradwire.comm.emulated import EmulatedBackend
from gradwire.comm.rates import LinkSpec
from gradwire_lab.bench.network import grid, methods, prediction_error, results_table, runner, workloads
from gradwire_lab.bench.network.emulation_error import EXCHANGES, compare
from gradwire_lab.cli.options import AsJson
from gradwire_lab.cli.output import ResultRows, check_picture, make_table, refusing, show
from gradwire_lab.launch import RankError
from gradwire_lab.network.namespaces import HostsUnavailableError, lacking, need
from gradwire_lab.train.record import append_line
from gradwire_lab.train.time_left import TimeLeft


def network(
    model: Annotated[
        list[str] | None, typer.Option(help="The model: lstm, resnet20, gpt, or mine.py:make. May be repeated.")
    ] = None,
    link: Annotated[
        list[str] | None, typer.Option(help="The link: 10mbit, 100mbit,20ms, unshaped, ... May be repeated.")
    ] = None,
    workers: Annotated[list[int] | None, typer.Option(min=2, help="Number of ranks. May be repeated.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="The method: ddp-fp32, 'topk(0.01) | sign', ... May be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each method, interleaved.")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="Steps of one turn.")] = 12,
    turn: Annotated[float, typer.Option(help="Seconds that a turn should not exceed; it has two steps at least.")] = 20,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds of a turn after which a method is given up; else 300, or what plain DDP may need."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="A file to append JSON lines to; rows in it are not measured again.")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Measure again what failed.")] = False,
    throttled: Annotated[
        bool, typer.Option("--throttled", help="Emulate the link, even where hosts could be made.")
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw the speed-ups into this PNG or SVG.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the table as Markdown.")] = False,
    as_json: AsJson = False,
) -> None:
    """Time the same training step over shaped links, by torch's methods and ours.

    As root, every rank is a separate host, in a network namespace; otherwise, ranks share an emulated link. What
    timed out in an earlier run is measured again with a longer --timeout.
    """
    names = method or list(methods.ALL)
    where = _where(throttled)
    with (
        refusing("bench network", ValueError, TypeError, OSError, HostsUnavailableError),
        refusing("bench network", runner.StartupError, code=1),
    ):
        check_picture(picture)
        usual = grid.Budget(rounds, steps, turn_seconds=turn)
        rows = grid.read(out)
        for name in names:
            methods.check(name)
        named = [_named(text, where) for text in link or ("unshaped", "1gbit", "100mbit", "10mbit")]
        # What is wrong with a workload is an error here, and not of every rank.
        loaded = {name: workloads.load(name).model.parameters() for name in model or ["lstm"]}
        weights = {name: sum(p.nbytes for p in made if p.requires_grad) for name, made in loaded.items()}
        chosen = [grid.Scenario(*place, where) for place in product(weights, named, workers or [2, 4, 8])]
        budgets = {
            scenario: grid.with_timeout(usual, scenario, weights[scenario.model])
            if timeout is None
            else replace(usual, timeout=timeout)
            for scenario in chosen
        }
        missing = {scenario: grid.missing(scenario, names, rows, budget, retry) for scenario, budget in budgets.items()}
        left = TimeLeft(sum(runner.turns(missing[scenario], budgets[scenario]) for scenario in chosen))
        for scenario in chosen:
            progress = _progress(scenario, left)
            for row in runner.measure(scenario, missing[scenario], budgets[scenario], progress):
                append_line(out, row)
                rows.append(row)
    wanted = {scenario.key(name) for scenario in chosen for name in names}
    found = results_table.results([row for row in grid.latest(rows) if grid.key_of(row) in wanted])
    if picture:
        results_table.picture(found, picture)
    _show(found, as_json, markdown)


def _show(found: Sequence[grid.Row], as_json: bool, markdown: bool) -> None:
    """Print what was found, in one of three forms."""
    if markdown and not as_json:
        typer.echo(results_table.markdown(found))
        return
    title = "silent: the same step without communication; dense: the better of torch's fp32 and 16 bits"
    results = ResultRows(as_json, make_table(title, results_table.COLUMNS, ("model", "link", "method")))
    for row in found:
        results.add(row, results_table.row_cells(row))
    results.show(
        *(f"{row['link']}, {row['world']} ranks, {row['method']}: {row['failed']}" for row in found if "failed" in row)
    )


def _where(throttled: bool) -> grid.Where:
    missing = lacking()
    if missing and not throttled:
        typer.echo(f"{missing}; measuring with emulated links instead", err=True)
    return "throttled" if throttled or missing else "hosts"


def _named(text: str, where: grid.Where) -> str:
    """A link as rows call it; on hosts it may have jitter and loss, too."""
    link = LinkSpec.parse(text)
    return str(link if where == "hosts" else EmulatedBackend(SingleBackend(), link).spec)


def _progress(scenario: grid.Scenario, left: TimeLeft) -> runner.Print:
    """Print where the ranks are: at the beginning of a turn, and so at the end of the one before, or of their start."""

    def report(line: str) -> None:
        left.finish()
        typer.echo(left.after(f"{scenario.model}, {scenario.link}, {scenario.world} ranks, {line}"), err=True)

    return report


def emulation_error(
    link: Annotated[
        list[str] | None, typer.Option(help="The link: 100mbit, 100mbit,20ms, ... May be repeated.")
    ] = None,
    workers: Annotated[int, typer.Option(min=2, help="Number of ranks.")] = 4,
    model: Annotated[str, typer.Option(help="The workload: linear, lstm, ...")] = "linear",
    exchange: Annotated[
        list[str] | None, typer.Option(help="The exchange: all-reduce, all-gather, two-way, gossip. May be repeated.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each exchange, interleaved.")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="Steps of one turn.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Compare step times on an emulated link with those among hosts on shaped links. Needs root."""
    columns = ("link", "exchange", "method", "shaped", "emulated", "ratio")
    results = ResultRows(as_json, make_table(f"{workers} ranks, milliseconds of a step", columns, columns[:3]))
    with refusing("bench link", ValueError, HostsUnavailableError):
        need()
        chosen = exchange or list(EXCHANGES)
        for name in chosen:
            if name not in EXCHANGES:
                raise ValueError(f"there is no exchange {name!r}; take {', '.join(EXCHANGES)}")
        links = [str(LinkSpec.parse(text)) for text in link or ("100mbit", "1gbit", "100mbit,5ms", "100mbit,20ms")]
        budget = grid.Budget(rounds, steps)
        left = TimeLeft(2 * len(links) * runner.turns([EXCHANGES[name] for name in chosen], budget))
        for named in links:
            report = _progress(grid.Scenario(model, named, workers, "hosts"), left)
            for one in compare(model, named, workers, budget, report, chosen):
                place = {"link": named, "world": workers, "model": model}
                both = {**one._asdict(), "pretended": one.emulated}  # the old name of the field, for one release
                row = {**place, **both, "ratio": one.ratio, "load": os.getloadavg()[0]}
                times = (one.failed or f"{one.shaped:.1f}", f"{one.emulated:.1f}", f"{one.ratio:.3f}")
                results.add(row, (named, one.exchange, one.method, *times))
    results.show(width=120)


def forecast(
    results: Annotated[Path, typer.Argument(help="The file that bench network --out wrote.")],
    out: Annotated[Path | None, typer.Option(help="A file for all comparisons, one JSON object a line.")] = None,
) -> None:
    """Compare the steps that advise predicts with those that bench network measured.

    The command calibrates first, so run nothing else meanwhile.
    """
    with refusing("bench forecast", ValueError, HostsUnavailableError, RankError):
        rows = grid.read(results)
        if not rows:
            raise ValueError(f"{results} holds no results; make some with `gradwire bench network --out {results}`")
        found = list(prediction_error.compare(rows, lambda line: typer.echo(line, err=True)))
    for one in found:
        append_line(out, one.as_row())
    steps = [one for one in found if isinstance(one, prediction_error.StepComparison)]
    columns = ("model", "link", "ranks", "method", "measured", "predicted", "error")
    table = make_table("milliseconds of a step", columns, ("model", "link", "method"))
    for one in steps:
        row = one.row
        numbers = (f"{1e3 * one.measured:,.1f}", f"{1e3 * one.predicted:,.1f}", f"{one.error:+.0%}")
        table.add_row(row["model"], row["link"], str(row["world"]), row["method"], *numbers)
    show(table)
    near = sum(abs(one.error) <= prediction_error.TOLERANCE for one in steps)
    typer.echo(f"{near} of {len(steps)} within {prediction_error.TOLERANCE:.0%}")
    for pick in (one for one in found if isinstance(one, prediction_error.ChoiceComparison)):
        right = "" if pick.regret <= prediction_error.REGRET else ", too far"
        typer.echo(
            f"{pick.model}, {pick.link}, {pick.world} ranks, {'by accuracy too' if pick.sound else 'by speed'}: "
            f"advice takes {pick.choice}, best was {pick.best}, {pick.regret:+.0%}{right}"
        )
