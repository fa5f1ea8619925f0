"""`gradwire bench`: how fast the kernels are, here."""

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

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
