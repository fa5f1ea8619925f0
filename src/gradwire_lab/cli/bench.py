"""`gradwire bench`: how fast kernels are here, what a step costs, what is held, and steps over thin links."""

import json
import os
import sys
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from gradwire.comm.rates import LinkSpec
from gradwire_lab.network.namespaces import Refused, lacking

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

    from gradwire_lab.bench.network.cells import Field, Where
    from gradwire_lab.bench.network.contest import Tell
    from gradwire_lab.bench.network.standings import Standing

app = typer.Typer(help="Measure, on this machine.", no_args_is_help=True)

COLUMNS = ("kernel", "elements", "segments", "ms", "GB/s", "x floor", "x definition", "x plain torch")
_WIDTH = 150  # of a table that no terminal shows
STEP_COLUMNS = ("workload", "ranks", "method", "ms", "x DDP", "quartiles", "x silent", "CPU x DDP", "kept", "peak")


@app.callback()
def bench() -> None:
    """Measure, on this machine."""


@app.command()
def kernels(
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    size: Annotated[
        list[int] | None, typer.Option(min=1, help="Elements; several may be given. By default 25.6 M.")
    ] = None,
    resnet50: Annotated[bool, typer.Option("--resnet50", help="ResNet-50's 161 tensors too, layer by layer.")] = False,
    only: Annotated[str, typer.Option(help="Only kernels whose name holds this.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Medians are of this many runs.")] = 10,
    picture: Annotated[Path | None, typer.Option(help="Draw times over bytes into this PNG or SVG.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")] = False,
) -> None:
    """Time every kernel against the memory it must touch, its definition, and what a person would write in torch."""
    from gradwire_lab.bench import kernels as bench_kernels

    _check_picture(picture, "kernels")
    _check_device(device, "kernels")
    sizes: list[int | tuple[int, ...]] = list(size or [25_600_000])
    sizes += [bench_kernels.resnet50()] if resnet50 else []
    table = Table(title=f"kernels on {device}: the floor is a copy of as many bytes, in the same run")
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "kernel" else "right", no_wrap=True)

    def report(row: dict[str, Any]) -> None:
        typer.echo(json.dumps(row) if as_json else _told(row), err=not as_json)
        table.add_row(*_cells(row))

    try:
        rows = bench_kernels.measure(device, sizes, only, repeats, report)
    except (ValueError, MemoryError, RuntimeError) as wrong:
        _refuse("kernels", _memory_said(wrong))
    if picture:
        from gradwire_lab.bench import roofline

        roofline.picture(rows, picture)
    if not as_json:
        _print(table)


def _refuse(command: str, wrong: object) -> NoReturn:
    typer.echo(f"gradwire bench {command}: {wrong}", err=True)
    raise typer.Exit(2) from None


def _print(table: Table) -> None:
    Console(width=None if sys.stdout.isatty() else _WIDTH).print(table)


def _memory_said(wrong: Exception) -> str:
    """What allocators say, as a sentence; anything else that a runtime says is a bug, and stays one."""
    if isinstance(wrong, ValueError):
        return str(wrong)
    if isinstance(wrong, MemoryError) or any(words in str(wrong) for words in ("out of memory", "can't allocate")):
        return "there is not enough memory for buffers of this size; say a smaller --size"
    raise wrong


def _check_device(device: str, command: str, workers: int = 1) -> None:
    """Say that there is no such device before ranks are started on it."""
    import torch

    from gradwire_lab.bench.network import devices

    try:
        if device not in ("cpu", "cuda"):
            raise ValueError(f"nothing is measured on {device!r}; say --device cpu or cuda")
        devices.parse(device)
    except ValueError as wrong:
        _refuse(command, wrong)
    if device == "cuda" and workers > torch.cuda.device_count():
        _refuse(command, f"{workers} ranks need as many GPUs, and torch sees {torch.cuda.device_count()}")


def _check_picture(path: Path | None, command: str) -> None:
    """Say what drawing needs before hours of measuring, not after."""
    wrong = ""
    if path is not None and not all(map(find_spec, ("altair", "vl_convert"))):
        wrong = "a picture needs two more packages; pip install 'gradwire[report]'"
    elif path is not None and path.suffix not in (".png", ".svg"):
        wrong = f"a picture is a PNG or an SVG, and {path} is none; name it {path.stem or 'picture'}.png"
    elif path is not None and not path.parent.is_dir():
        wrong = f"there is no folder {path.parent} for the picture; make it first"
    if wrong:
        _refuse(command, wrong)


def _told(row: dict[str, Any]) -> str:
    what = f"{row['kernel']}, {row['n']:,} elements, segments: {row['segments']}"
    return f"{what}: {row['ms']:.3f} ms, {row['to_floor']:.2f} x floor"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        str(row["kernel"]),
        f"{row['n']:,}",
        str(row["segments"]),
        f"{row['ms']:.3f}",
        f"{row['gb_per_s']:.1f}",
        f"{row['to_floor']:.2f}",
        f"{row['to_reference']:.1f}",
        f"{row['to_torch']:.1f}" if row["to_torch"] else "",
    )


@app.command()
def step(
    workload: Annotated[list[str] | None, typer.Option(help="resnet20, gpt, resnet50, gpt2; several.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    workers: Annotated[int, typer.Option(min=0, help="How many ranks, on this machine.")] = 0,
    method: Annotated[list[str] | None, typer.Option(help="ddp-bf16, 'topk(0.01) | sign', ...; several.")] = None,
    batch: Annotated[int, typer.Option(min=0, help="Of each rank; 0 for the usual one.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Blocks of steps of each method, interleaved.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Of one block.")] = 4,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")] = False,
) -> None:
    """Time a training step without a network: by plain DDP, by torch's hooks, by ours, and without any exchange.

    A world of two on a CPU, of one on a GPU, unless you say otherwise.
    """
    from gradwire_lab.bench import step as bench_step

    on_gpu = device == "cuda"
    world = workers or (1 if on_gpu else 2)
    methods = tuple(dict.fromkeys((*bench_step.ALWAYS, *(method or bench_step.METHODS))))
    _check_device(device, "step", world)
    table = Table(title=f"steps on {device}: DDP is torch's in float32; silent does not communicate")
    for column in STEP_COLUMNS:
        table.add_column(column, justify="left" if column in ("workload", "method") else "right")
    names = workload or (["gpt2", "resnet50"] if on_gpu else ["resnet20", "gpt"])
    jobs = [bench_step.Job(name, device, methods, batch, rounds, steps) for name in names]
    refusals = []
    try:
        for job in jobs:
            bench_step.check(job)
        for job in jobs:
            for row in bench_step.measure(job, world, lambda line: typer.echo(line, err=True)):
                if as_json:
                    typer.echo(json.dumps(row))
                table.add_row(*_step_cells(row))
                refusals += [f"{row['workload']}, {row['method']}: {row['refused']}"] if "refused" in row else []
    except (ValueError, TypeError, RuntimeError) as wrong:
        _refuse("step", wrong)
    if not as_json:
        _print(table)
        typer.echo("\n".join(refusals), nl=bool(refusals))


def _step_cells(row: dict[str, Any]) -> tuple[str, ...]:
    start = (row["workload"], str(row["world"]), row["method"])
    if "refused" in row:
        return (*start, "refused", *("" for _ in STEP_COLUMNS[4:]))
    low, high = row["to_dense_quartiles"]
    return (
        *start,
        f"{row['step_ms']:.2f}",
        f"{row['to_dense']:.3f}",
        f"{low:.3f} to {high:.3f}",
        f"{row['to_silent']:.3f}",
        f"{row['busy_to_dense']:.3f}",
        *("" if row[name] is None else f"{row[name]:.2f}" for name in ("kept_floats", "peak_floats")),
    )


@app.command()
def memory(
    spec: Annotated[list[str] | None, typer.Option(help="'dgc(0.001)', 'sign; feedback=none', ...; several.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    size: Annotated[int, typer.Option(min=10, help="Parameters of the model.")] = 25_600_000,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")] = False,
) -> None:
    """Weigh methods: floats per parameter that they keep, and that they hold at most within a step."""
    from gradwire_lab.bench import memory as bench_memory

    _check_device(device, "memory")
    table = Table(title=f"floats per parameter on {device}, beside parameters and gradients")
    for column in ("spec", "kept", "peak", "due"):
        table.add_column(column, justify="left" if column == "spec" else "right")
    try:
        for one in spec or ():
            bench_memory.check(one)
        for row in bench_memory.measure(spec or bench_memory.SPECS, device, size):
            numbers = (row["kept_floats"], row["peak_floats"], row["due_floats"])
            shown = (row["spec"], *("" if number is None else f"{number:.2f}" for number in numbers))
            told = f"{shown[0]}: {shown[1]} floats kept, {shown[2]} at most"
            typer.echo(json.dumps(row) if as_json else told, err=not as_json)
            table.add_row(*shown)
    except (ValueError, TypeError, RuntimeError) as wrong:
        _refuse("memory", wrong)
    if not as_json:
        _print(table)


@app.command()
def network(
    model: Annotated[list[str] | None, typer.Option(help="lstm, resnet20, gpt, or mine.py:make; several.")] = None,
    link: Annotated[list[str] | None, typer.Option(help="10mbit, 100mbit,20ms, unshaped, ...; several.")] = None,
    workers: Annotated[list[int] | None, typer.Option(min=2, help="How many ranks; several.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="ddp-fp32, 'topk(0.01) | sign', ...; several.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each method, interleaved.")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="Of one turn.")] = 12,
    turn: Annotated[float, typer.Option(help="Seconds that a turn should not exceed; it has two steps at least.")] = 20,
    timeout: Annotated[
        float | None,
        typer.Option(help="Seconds of a turn after which a method is given up; else 300, or what plain DDP may need."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="JSONL to append to; what it holds is not measured again.")] = None,
    retry: Annotated[bool, typer.Option("--retry", help="But what failed is.")] = False,
    throttled: Annotated[
        bool, typer.Option("--throttled", help="On a link that pretends, also where hosts could be made.")
    ] = False,
    picture: Annotated[Path | None, typer.Option(help="Draw the multiples into this PNG or SVG.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table as Markdown.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")] = False,
) -> None:
    """Time the same training step over shaped links, by torch's methods and ours.

    As root, every rank is a host of its own, in a network namespace; otherwise, ranks share a link that pretends. What
    timed out in an earlier run is measured again with a longer --timeout.
    """
    from gradwire_lab.bench.network import cells, contest, contestants, standings

    _check_picture(picture, "network")
    methods = method or list(contestants.ALL)
    where = _where(throttled)
    try:
        usual = cells.Pace(rounds, steps, turn_seconds=turn)
        rows = cells.read(out)
        for name in methods:
            contestants.check(name)
        named = [_named(text, where) for text in link or ("unshaped", "1gbit", "100mbit", "10mbit")]
        weights = _weights(model or ["lstm"])
        chosen = list(cells.fields(list(weights), named, workers or [2, 4, 8], where))
        for field in chosen:
            derived = cells.patient(usual, field, weights[field.model])
            pace = derived if timeout is None else replace(usual, timeout=timeout)
            for row in contest.hold(field, cells.missing(field, methods, rows, pace, retry), pace, _tell(field)):
                cells.append(out, row)
                rows.append(row)
    except (ValueError, TypeError, OSError, Refused) as wrong:
        typer.echo(f"gradwire bench network: {wrong}", err=True)
        raise typer.Exit(2) from None
    except contest.Unbegun as wrong:
        typer.echo(f"gradwire bench network: {wrong}", err=True)
        raise typer.Exit(1) from None
    wanted = {field.key(name) for field in chosen for name in methods}
    found = standings.standings([row for row in cells.latest(rows) if cells.key_of(row) in wanted])
    if picture:
        standings.picture(found, picture)
    if as_json:
        for one in found:
            typer.echo(json.dumps(one.row | {"multiple": one.multiple, "speedup": one.speedup, "honest": one.honest}))
        return
    if markdown:
        typer.echo(standings.markdown(found))
        return
    _show(found)


def _weights(models: list[str]) -> dict[str, int]:
    """Bytes of each workload's gradients. What is wrong with one is said here, and not by every rank."""
    from gradwire_lab.bench.network import workloads

    return {name: _nbytes(workloads.load(name).model.parameters()) for name in models}


def _nbytes(parameters: "Iterable[Tensor]") -> int:
    return sum(p.numel() * p.element_size() for p in parameters if p.requires_grad)


def _where(throttled: bool) -> "Where":
    missing = lacking()
    if missing and not throttled:
        typer.echo(f"{missing}; measuring with links that pretend instead", err=True)
    return "throttled" if throttled or missing else "hosts"


def _named(text: str, where: "Where") -> str:
    """A link as rows call it; on hosts it may have jitter and loss, too."""
    from gradwire.comm.emulated import EmulatedBackend
    from gradwire.comm.single import SingleBackend

    link = LinkSpec.parse(text)
    return str(link if where == "hosts" else EmulatedBackend(SingleBackend(), link).spec)


def _tell(field: "Field") -> "Tell":
    return lambda line: typer.echo(f"{field.model}, {field.link}, {field.world} ranks, {line}", err=True)


def _show(found: "list[Standing]") -> None:
    from gradwire_lab.bench.network.standings import COLUMNS as columns
    from gradwire_lab.bench.network.standings import words

    table = Table(title="silent: the same step without communication; dense: the better of torch's fp32 and 16 bits")
    for column in columns:
        table.add_column(column, justify="left" if column in ("model", "link", "method") else "right")
    for one in found:
        table.add_row(*words(one))
    _print(table)
    for one in found:
        if "failed" in one.row:
            typer.echo(f"{one.row['link']}, {one.row['world']} ranks, {one.row['method']}: {one.row['failed']}")


@app.command("link")
def likeness(
    link: Annotated[list[str] | None, typer.Option(help="100mbit, 100mbit,20ms, ...; several.")] = None,
    workers: Annotated[int, typer.Option(min=2, help="How many ranks.")] = 4,
    model: Annotated[str, typer.Option(help="The workload: linear, lstm, ...")] = "linear",
    exchange: Annotated[list[str] | None, typer.Option(help="all-reduce, all-gather, two-way, gossip.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="Turns of each exchange, interleaved.")] = 3,
    steps: Annotated[int, typer.Option(min=2, help="Of one turn.")] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line instead of a table.")] = False,
) -> None:
    """Compare step times on a link that pretends with those among hosts on shaped links. Needs root."""
    from gradwire_lab.bench.network.cells import Field, Pace
    from gradwire_lab.bench.network.likeness import EXCHANGES, compare

    table = Table(title=f"{workers} ranks, milliseconds of a step")
    for column in ("link", "exchange", "method", "shaped", "pretended", "ratio"):
        table.add_column(column, justify="left" if column in ("link", "exchange", "method") else "right")
    try:
        if missing := lacking():
            raise Refused(missing)
        chosen = exchange or list(EXCHANGES)
        for name in chosen:
            if name not in EXCHANGES:
                raise ValueError(f"there is no exchange {name!r}; take {', '.join(EXCHANGES)}")
        for text in link or ("100mbit", "1gbit", "100mbit,5ms", "100mbit,20ms"):
            named = str(LinkSpec.parse(text))
            tell = _tell(Field(model, named, workers, "hosts"))
            for one in compare(model, named, workers, Pace(rounds, steps), tell, chosen):
                if as_json:
                    load = os.getloadavg()[0]
                    found = {**one._asdict(), "ratio": one.ratio, "load": load}
                    typer.echo(json.dumps({"link": named, "world": workers, "model": model, **found}))
                shown = one.failed or f"{one.shaped:.1f}"
                table.add_row(named, one.exchange, one.method, shown, f"{one.pretended:.1f}", f"{one.ratio:.3f}")
    except (ValueError, Refused) as wrong:
        typer.echo(f"gradwire bench link: {wrong}", err=True)
        raise typer.Exit(2) from None
    if not as_json:
        Console(width=None if sys.stdout.isatty() else 120).print(table)
