"""``gradwire watch RUN``: a training that runs, seen from another terminal, and on a page."""

import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gradwire_lab.cli.output import needing_charts, refusing
from gradwire_lab.report.load import LOG, RunRecord, load
from gradwire_lab.report.progress import progress
from gradwire_lab.signals import sigterm_interrupts
from gradwire_lab.train.run_folder import in_use

if TYPE_CHECKING:
    from gradwire_lab.report.live_page import LivePage

BARS = "▁▂▃▄▅▆▇"  # the highest leaves a gap to the line above it
LENGTH = 60  # of a curve, in characters, at most
PATIENCE = 20.0  # seconds in which a training that was started just before makes its folder


def watch(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between updates.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print once, and exit.")] = False,
    page: Annotated[
        Path | None,
        typer.Option(
            help="Keep the run's report in this file: live.html. It updates itself until the run has ended. "
            "Needs gradwire[report]."
        ),
    ] = None,
) -> None:
    """Show a training while it runs: loss, metric, bytes, ratio, skipped steps and the time left.

    It waits for the first record of a training that has just been started. Where its output is a file or a pipe, it
    prints once, as with --once.
    """
    console = Console()
    with refusing("watch", ValueError, OSError):
        live_page = None if page is None else _live_page(page)
        await_record(run, 0.0 if once else PATIENCE)
        if once or not (console.is_terminal or live_page):
            seen = load(run)
            console.print(view(seen, console.width))
        else:
            seen = _follow(run, every, console, live_page)
        if live_page is not None:
            live_page.close(seen)


def await_record(run: Path, patience: float) -> None:
    """Wait for a run's first record while a process trains in its folder, or so many seconds for a folder to be made.

    Raises:
        ValueError: There is no record, and none is expected.
    """
    end, told = time.monotonic() + patience, False
    while not _recorded(run):
        expected = in_use(run) or (time.monotonic() < end and _age(run) < PATIENCE and not _runs_inside(run))
        if not (patience and expected):
            raise ValueError(_no_record(run))
        if not told:
            typer.echo(f"waiting for the first record in {run}", err=True)
            told = True
        time.sleep(0.2)


def view(run: RunRecord, width: int) -> Group:
    """What is shown of a run, in a terminal of this width."""
    length = max(10, min(LENGTH, width - 30))
    table = Table.grid(padding=(0, 2))
    for line in progress(run):
        text = f"{line.text:<7} {curve(list(line.values), length)}" if line.values else line.text
        table.add_row(line.name, Text(text, overflow="fold"))
    return Group(table)


def curve(values: list[float], length: int = LENGTH) -> str:
    """Numbers as bars of characters, the last of each of at most ``length`` stretches; what is not finite is blank."""
    count = min(length, len(values))
    chosen = [values[(i + 1) * len(values) // count - 1] for i in range(count)]
    finite = [value for value in chosen if value - value == 0]
    low, high = (min(finite), max(finite)) if finite else (0.0, 0.0)
    heights = [
        round((value - low) / ((high - low) or 1.0) * (len(BARS) - 1)) if value in finite else -1 for value in chosen
    ]
    return "".join(" " if height < 0 else BARS[height] for height in heights)


def _live_page(path: Path) -> "LivePage":
    if path.is_dir():
        raise ValueError(f"{path} is a folder; name a file for the page, such as {path / 'live.html'}")
    with needing_charts("watch"):
        from gradwire_lab.report.live_page import LivePage
    return LivePage(path)


def _recorded(run: Path) -> bool:
    log = run / LOG
    return log.is_file() and log.stat().st_size > 0


def _age(run: Path) -> float:
    """Seconds since a folder was made or last added to; none where there is no folder yet."""
    return time.time() - run.stat().st_mtime if run.exists() else 0.0


def _runs_inside(folder: Path) -> list[Path]:
    return sorted(log.parent for log in folder.glob(f"*/{LOG}"))


def _no_record(run: Path) -> str:
    if not run.is_dir():
        return f"there is no folder {run}; start a training first, or name the folder that `gradwire train` prints"
    inside = _runs_inside(run)
    if inside:
        return f"{run} is not a run folder, but it holds some; name one of them, such as {inside[0]}"
    return f"{run} has no record of a training: no {LOG}, or an empty one; start one in it, or name another folder"


def _follow(run: Path, every: float, console: Console, page: "LivePage | None") -> RunRecord:
    """Look again and again, until the run has ended or someone has seen enough; what was seen last."""
    seen = load(run)
    if page is not None:
        typer.echo(f"{page.path} opens in any browser, and follows the run until it has ended")
    with (
        Live(view(seen, console.width), console=console, auto_refresh=False) as live,
        sigterm_interrupts(),
        suppress(KeyboardInterrupt),
    ):
        while seen.final is None:
            began = time.monotonic()
            if page is not None:
                page.look(seen)
            time.sleep(max(0.0, every - (time.monotonic() - began)))
            seen = load(run)
            live.update(view(seen, console.width), refresh=True)
    if not console.is_terminal:
        console.line()  # rich has printed the last view alone, without the end of its last line
    return seen
