"""`gradwire bench calls`: what a user's call costs, beside the bytes that it cannot avoid."""

import json
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from gradwire_lab.bench import calls as bench_calls
from gradwire_lab.cli.bench_checks import check_device
from gradwire_lab.cli.options import Device
from gradwire_lab.cli.output import ResultRows, make_table, refusing

COLUMNS = (
    *("model", "entry point", "spec", "bytes", "floor ms", "ms", "without", "x floor", "worst ms", "host ms"),
    *("x plain", "x kernels"),
)


def calls(
    entry_point: Annotated[list[str] | None, typer.Option(help="loop, ddp, optimizer, hosts; several.")] = None,
    door: Annotated[list[str] | None, typer.Option(hidden=True)] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="one, resnet50, gpt2; several. By default the first two.")
    ] = None,
    spec: Annotated[list[str] | None, typer.Option(help="'dgc(0.001)', int4, ...; several.")] = None,
    size: Annotated[int, typer.Option(min=0, help="Parameters in all, about; 0 for the model's own.")] = 0,
    device: Device = "cpu",
    addresses: Annotated[
        str, typer.Option(help="same: gradients stay in place; moving: they are freed and allocated.")
    ] = "same",
    ranks: Annotated[int, typer.Option(min=1, help="How many processes.")] = 1,
    repeats: Annotated[int, typer.Option(min=1, help="Medians are of this many calls.")] = 20,
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
    results = ResultRows(printed, make_table(title, COLUMNS, COLUMNS[:3], no_wrap=True), count)

    def report(row: dict[str, Any]) -> None:
        if jsonl is not None and not printed:
            with jsonl.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        case = f"{row['model']}, {row['entry_point']}, {row['spec']}"
        results.add(row, _cells(row), f"{case}: {row['call_ms']:.3f} ms, {row['to_floor']:.2f} x floor")

    with refusing("bench calls", ValueError, TypeError, RuntimeError, OSError):
        check_device(device)
        benches = [
            bench_calls.CallBench(m, d, tuple(specs), size, device, addresses, repeats) for m in models for d in entries
        ]
        for bench in benches:
            bench_calls.check(bench, ranks)
        for bench in benches:
            bench_calls.measure(bench, ranks, report)
    results.show()


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    numbers = ("floor_ms", "ms", "without_ms", "to_floor", "worst_ms", "host_ms")
    words = (f"{row['model']}, {row['params'] / 1e6:.3g} M", row["entry_point"], row["spec"])
    ratios = ("-" if row[name] is None else f"{row[name]:.2f}" for name in ("to_plain", "to_kernels"))
    return (*words, f"{row['bytes_per_param']:.2f}", *(f"{row[name]:.3f}" for name in numbers), *ratios)
