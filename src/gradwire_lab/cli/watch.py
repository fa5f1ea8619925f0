"""``gradwire watch RUN``: a training that runs, seen from another terminal."""

import time
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from gradwire_lab.cli.output import refusing
from gradwire_lab.report.load import LOG, RunRecord, load
from gradwire_lab.report.machine_load import noted_in
from gradwire_lab.report.numbers import in_bytes, ratio

BARS = "▁▂▃▄▅▆▇█"
LENGTH = 60  # of a curve, in characters, at most


def watch(
    run: Annotated[Path, typer.Argument(help="The folder of a run.")],
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between two looks.")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Print once, and exit.")] = False,
) -> None:
    """Show a training while it runs: loss, metric, bytes, ratio, skipped steps and the time left."""
    console = Console()
    with refusing("watch", ValueError, OSError):
        if not (run / LOG).is_file():
            raise ValueError(f"{run} is no run folder: it has no {LOG}; name one such as runs/digits-0")
        if once or not console.is_terminal:
            console.print(view(load(run), console.width))
            return
        with Live(view(load(run), console.width), console=console, auto_refresh=False) as live:
            try:
                while load(run).final is None:
                    time.sleep(every)
                    live.update(view(load(run), console.width), refresh=True)
            except KeyboardInterrupt:
                return


def view(run: RunRecord, width: int) -> Group:
    """What is shown of a run, in a terminal of this width."""
    length = max(10, min(LENGTH, width - 30))
    latest = {**(run.steps[-1] if run.steps else {}), **(run.last if not run.steps or run.final else {})}
    step, steps = int(latest.get("step", 0)), int(run.start.get("steps", 0))
    table = Table.grid(padding=(0, 2))
    table.add_row("run", Text(f"{run.folder}: {run.spec}, {run.ranks} workers", overflow="fold"))
    table.add_row("step", f"{step:,} of {steps:,}, {_left(run, latest, steps)}")
    losses = [float(record["loss"]) for record in run.steps if record.get("loss") is not None]
    if losses:
        table.add_row("loss", f"{losses[-1]:.4f}  {curve(losses, length)}")
    values = [run.value(record) for record in run.epochs]
    if values:
        table.add_row(run.metric.axis, f"{values[-1]:.2f}  {curve(values, length)}")
    if latest.get("sent"):
        table.add_row("sent", f"{in_bytes(latest['sent'])} by each worker")
        table.add_row("payload", f"{ratio(latest.get('payload_ratio') or 1)} smaller than float32")
    load = noted_in(run.epochs[-1] if run.epochs else run.start)
    if load is not None:
        table.add_row("machine", f"{load}, busy with other work" if load.busy else str(load))
    table.add_row("skipped", f"{int(latest.get('skipped') or 0):,} steps")
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


def _left(run: RunRecord, latest: dict[str, object], steps: int) -> str:
    """How long the rest will take, by the steps of this session."""
    if run.final is not None:
        return "ended"
    done, seconds = (
        float(str(latest.get(name) or 0)) - float(run.start.get(name) or 0) for name in ("step", "seconds")
    )
    if done <= 0:
        return "time left is not known yet"
    return f"about {timedelta(seconds=round(seconds / done * (steps - float(str(latest['step'])))))} left"
