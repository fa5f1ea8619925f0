"""`gradwire bench`: how fast kernels are here, what a call and a step cost, what is held, and steps over thin links."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire_lab.cli.bench_calls import calls
from gradwire_lab.cli.bench_checks import check_device, check_picture
from gradwire_lab.cli.bench_network import emulation_error, network
from gradwire_lab.cli.output import make_table, refuse, show

app = typer.Typer(help="Measure, on this machine.", no_args_is_help=True)

COLUMNS = ("kernel", "elements", "segments", "ms", "GB/s", "x floor", "x definition", "x plain torch", "x Gaussian")
STEP_COLUMNS = ("workload", "ranks", "method", "ms", "x DDP", "quartiles", "x silent", "CPU x DDP", "kept", "peak")


@app.callback()
def bench() -> None:
    """Measure, on this machine."""


for command in (calls, network):
    app.command()(command)
app.command("link")(emulation_error)


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

    check_picture(picture, "kernels")
    check_device(device, "kernels")
    sizes: list[int | tuple[int, ...]] = list(size or [25_600_000])
    sizes += [bench_kernels.resnet50()] if resnet50 else []
    title = f"kernels on {device}: the floor is a copy of as many bytes, in the same run"
    table = make_table(title, COLUMNS, ("kernel",), no_wrap=True)

    def report(row: dict[str, Any]) -> None:
        typer.echo(json.dumps(row) if as_json else _told(row), err=not as_json)
        table.add_row(*_cells(row))

    try:
        rows = bench_kernels.measure(device, sizes, only, repeats, report)
    except (ValueError, MemoryError, RuntimeError) as wrong:
        refuse("bench kernels", _memory_said(wrong))
    if picture:
        from gradwire_lab.bench import roofline

        roofline.picture(rows, picture)
    if not as_json:
        show(table)


def _memory_said(wrong: Exception) -> str:
    """What allocators say, as a sentence; anything else that a runtime says is a bug, and stays one."""
    if isinstance(wrong, ValueError):
        return str(wrong)
    if isinstance(wrong, MemoryError) or any(words in str(wrong) for words in ("out of memory", "can't allocate")):
        return "there is not enough memory for buffers of this size; say a smaller --size"
    raise wrong


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
        f"{row['to_gaussian']:.2f}" if row["to_gaussian"] else "",
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
    check_device(device, "step", world)
    title = f"steps on {device}: DDP is torch's in float32; silent does not communicate"
    table = make_table(title, STEP_COLUMNS, ("workload", "method"))
    names = workload or (["gpt2", "resnet50"] if on_gpu else ["resnet20", "gpt"])
    jobs = [bench_step.StepBench(name, device, methods, batch, rounds, steps) for name in names]
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
        refuse("bench step", wrong)
    if not as_json:
        show(table)
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

    check_device(device, "memory")
    title = f"floats per parameter on {device}, beside parameters and gradients"
    table = make_table(title, ("spec", "kept", "peak", "due"), ("spec",))
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
        refuse("bench memory", wrong)
    if not as_json:
        show(table)
