"""`gradwire bench`: how fast kernels are here, what a call and a step cost, what is held, and steps over thin links."""

import re
import warnings
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire_lab.bench import calls as bench_calls
from gradwire_lab.bench import kernels as bench_kernels
from gradwire_lab.bench import memory as bench_memory
from gradwire_lab.bench import step as bench_step
from gradwire_lab.bench.network.devices import check_ranks
from gradwire_lab.cli.options import AsJson, Device
from gradwire_lab.cli.output import ResultRows, check_picture, make_table, refusing
from gradwire_lab.train.record import append_line
from gradwire_lab.train.time_left import TimeLeft

COLUMNS = ("kernel", "elements", "segments", "ms", "GB/s", "x floor", "x definition", "x plain torch", "x Gaussian")
_OPTIONAL = {"to_torch": ".1f", "to_gaussian": ".2f"}
STEP_COLUMNS = ("workload", "ranks", "method", "ms", "x DDP", "quartiles", "x silent", "CPU x DDP", "kept", "peak")
CALL_COLUMNS = (
    *("model", "entry point", "spec", "bytes", "floor ms", "ms", "without", "x floor", "worst ms", "host ms"),
    *("x plain", "x kernels"),
)


def kernels(
    device: Device = "cpu",
    size: Annotated[
        list[int] | None, typer.Option(min=1, help="Number of elements. May be repeated; by default 25.6 M.")
    ] = None,
    resnet50: Annotated[
        bool, typer.Option("--resnet50", help="Also time ResNet-50's 161 tensors, layer by layer.")
    ] = False,
    only: Annotated[str, typer.Option(help="Time only kernels whose name holds this.")] = "",
    repeats: Annotated[int, typer.Option(min=1, help="Number of runs that a median is taken of.")] = 10,
    picture: Annotated[Path | None, typer.Option(help="Draw times over bytes into this PNG or SVG.")] = None,
    as_json: AsJson = False,
) -> None:
    """Time every kernel against the memory it must touch, its definition, and what a person would write in torch."""
    tables = [*((n,) for n in size or [25_600_000]), *([bench_kernels.resnet50()] if resnet50 else [])]
    title = f"kernels on {device}: the floor is a copy of as many bytes, in the same run"
    with refusing("bench kernels", ValueError):
        count = sum(len(bench_kernels.chosen(only, lengths)) for lengths in tables)
        check_picture(picture)
        check_ranks(device)
        results, rows = ResultRows(as_json, make_table(title, COLUMNS, ("kernel",), no_wrap=True), count), []
        try:
            for row in bench_kernels.measure(device, tables, only, repeats):
                what = f"{row['kernel']}, {row['n']:,} elements, segments: {row['segments']}"
                results.add(row, _cells(row), f"{what}: {row['ms']:.3f} ms, {row['to_floor']:.2f} x floor")
                rows.append(row)
        except (MemoryError, RuntimeError) as wrong:
            if isinstance(wrong, RuntimeError) and not re.search("out of memory|can't allocate", str(wrong)):
                raise
            raise ValueError("there is not enough memory for buffers of this size; give a smaller --size") from None
    if picture:
        from gradwire_lab.bench import roofline

        roofline.picture(rows, picture)
    results.show()


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    formats = {"ms": ".3f", "gb_per_s": ".1f", "to_floor": ".2f", "to_reference": ".1f"}
    numbers = (format(row[name], style) for name, style in formats.items())
    ratios = (format(row[name], style) if row[name] else "" for name, style in _OPTIONAL.items())
    return (str(row["kernel"]), f"{row['n']:,}", str(row["segments"]), *numbers, *ratios)


def step(
    workload: Annotated[
        list[str] | None, typer.Option(help="The model: resnet20, gpt, resnet50, gpt2. May be repeated.")
    ] = None,
    device: Device = "cpu",
    workers: Annotated[int, typer.Option(min=0, help="Number of ranks on this machine; 0 for the usual number.")] = 0,
    method: Annotated[
        list[str] | None, typer.Option(help="The method: ddp-bf16, 'topk(0.01) | sign', ... May be repeated.")
    ] = None,
    batch: Annotated[int, typer.Option(min=0, help="Batch of each rank; 0 for the usual one.")] = 0,
    rounds: Annotated[int, typer.Option(min=1, help="Blocks of steps of each method, interleaved.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Steps of one block.")] = 4,
    optimizer: Annotated[
        str, typer.Option(help="The optimizer: sgd, or adamw (gradwire.AdamW for our methods).")
    ] = "sgd",
    warm: Annotated[int, typer.Option(min=1, help="Steps that do not count; give more than a method's start.")] = 3,
    as_json: AsJson = False,
) -> None:
    """Time a training step without a network: by plain DDP, by torch's hooks, by ours, and without any exchange.

    There are two ranks on a CPU and one on a GPU, unless you give --workers.
    """
    on_gpu = device == "cuda"
    world = workers or (1 if on_gpu else 2)
    methods = tuple(dict.fromkeys((*bench_step.ALWAYS, *(method or bench_step.METHODS))))
    title = f"steps on {device}: DDP is torch's in float32; silent does not communicate"
    results = ResultRows(as_json, make_table(title, STEP_COLUMNS, ("workload", "method")))
    names = workload or (["gpt2", "resnet50"] if on_gpu else ["resnet20", "gpt"])
    jobs = [bench_step.StepBench(name, device, methods, batch, rounds, steps, optimizer, warm) for name in names]
    refusals = []
    with refusing("bench step", ValueError, TypeError, RuntimeError):
        check_ranks(device, world)
        for job in jobs:
            bench_step.check(job)
        left = TimeLeft(sum(map(bench_step.blocks, jobs)))
        for job in jobs:
            for row in bench_step.measure(job, world, lambda line: typer.echo(line, err=True), left):
                results.add(row, _step_cells(row))
                refusals += [f"{row['workload']}, {row['method']}: {row['refused']}"] if "refused" in row else []
    results.show(*refusals)


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


def memory(
    spec: Annotated[
        list[str] | None, typer.Option(help="The spec: 'dgc(0.001)', 'sign; feedback=none', ... May be repeated.")
    ] = None,
    device: Device = "cpu",
    size: Annotated[int, typer.Option(min=10, help="Parameters of the model.")] = 25_600_000,
    as_json: AsJson = False,
) -> None:
    """Measure memory: floats per parameter that a method keeps, and that it holds at most within a step."""
    chosen = spec or bench_memory.SPECS
    title = f"floats per parameter on {device}, beside parameters and gradients"
    results = ResultRows(as_json, make_table(title, ("spec", "kept", "peak", "due"), ("spec",)), len(chosen))
    with refusing("bench memory", ValueError, TypeError, RuntimeError):
        check_ranks(device)
        for one in spec or ():
            bench_memory.check(one)
        for row in bench_memory.measure(chosen, device, size):
            numbers = (row["kept_floats"], row["peak_floats"], row["due_floats"])
            kept, peak, due = ("" if number is None else f"{number:.2f}" for number in numbers)
            results.add(row, (row["spec"], kept, peak, due), f"{row['spec']}: {kept} floats kept, {peak} at most")
    results.show()


def calls(
    entry_point: Annotated[
        list[str] | None, typer.Option(help="How it is called: loop, ddp, optimizer, hosts. May be repeated.")
    ] = None,
    door: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="The model: one, resnet50, gpt2. May be repeated; by default the first two."),
    ] = None,
    spec: Annotated[list[str] | None, typer.Option(help="The spec: 'dgc(0.001)', int4, ... May be repeated.")] = None,
    size: Annotated[int, typer.Option(min=0, help="Number of parameters, about; 0 for the model's own.")] = 0,
    device: Device = "cpu",
    addresses: Annotated[
        str, typer.Option(help="same: gradients stay in place; moving: they are freed and allocated.")
    ] = "same",
    ranks: Annotated[int, typer.Option("--workers", "--ranks", min=1, help="Number of ranks.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Number of calls that a median is taken of.")] = 20,
    jsonl: Annotated[
        Path | None, typer.Option(help="Append every row to this file; - prints rows, not a table.")
    ] = None,
) -> None:
    """Time what a user's call costs: the bytes it cannot avoid, plain torch DGC, and wire() by several methods."""
    if door:
        warnings.warn("bench calls --door is now --entry-point", FutureWarning, stacklevel=2)
    title = f"calls on {device}: the floor is a copy of the bytes that the call must read and write"
    printed = jsonl is not None and str(jsonl) == "-"
    models, entries, specs = model or ("one", "resnet50"), entry_point or door or ("loop",), spec or bench_calls.SPECS
    count = len(models) * len(entries) * len(specs)
    results = ResultRows(printed, make_table(title, CALL_COLUMNS, CALL_COLUMNS[:3], no_wrap=True), count)
    with refusing("bench calls", ValueError, TypeError, RuntimeError, OSError):
        check_ranks(device)
        benches = [
            bench_calls.CallBench(m, d, tuple(specs), size, device, addresses, repeats) for m in models for d in entries
        ]
        for bench in benches:
            bench_calls.check(bench, ranks)
        for row in chain.from_iterable(bench_calls.measure(bench, ranks) for bench in benches):
            append_line(None if printed else jsonl, row)
            case = f"{row['model']}, {row['entry_point']}, {row['spec']}"
            results.add(row, _call_cells(row), f"{case}: {row['call_ms']:.3f} ms, {row['to_floor']:.2f} x floor")
    results.show()


def _call_cells(row: dict[str, Any]) -> tuple[str, ...]:
    numbers = ("floor_ms", "ms", "without_ms", "to_floor", "worst_ms", "host_ms")
    words = (f"{row['model']}, {row['params'] / 1e6:.3g} M", row["entry_point"], row["spec"])
    ratios = ("-" if row[name] is None else f"{row[name]:.2f}" for name in ("to_plain", "to_kernels"))
    return (*words, f"{row['bytes_per_param']:.2f}", *(f"{row[name]:.3f}" for name in numbers), *ratios)
