"""``gradwire report RUNS...``: one page, pictures or markdown tables from run folders."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gradwire_lab.report.load import load, nothing_in, sort_out
from gradwire_lab.report.run_groups import tasks
from gradwire_lab.report.table import markdown as tables

if TYPE_CHECKING:
    from gradwire_lab.report.run_groups import Task

PAGE = Path("report.html")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help=f"The page; {PAGE} unless something else is asked for.")
    ] = None,
    title: Annotated[str, typer.Option(help="What the page is called.")] = "gradwire report",
    png: Annotated[Path | None, typer.Option(help="A folder for the charts as PNG; no browser needed.")] = None,
    svg: Annotated[Path | None, typer.Option(help="A folder for the charts as SVG.")] = None,
    markdown: Annotated[
        Path | None, typer.Option(help="A file for tables in markdown, such as docs/results.md; - prints them.")
    ] = None,
) -> None:
    """Write one self-contained HTML page about some runs."""
    try:
        found = tasks([load(folder) for folder in _runs_in(runs)])
        if not found:
            raise ValueError("no run has finished an epoch yet, so there is nothing to report")
        if markdown is not None:
            _write_tables(found, markdown)
        for folder, kind in ((png, "png"), (svg, "svg")):
            if folder is not None:
                _write_pictures(found, folder, kind)
        if output is not None or (markdown, png, svg) == (None, None, None):
            _write_page(found, output or PAGE, title)
    except ValueError as wrong:
        typer.echo(f"gradwire report: {wrong}", err=True)
        raise typer.Exit(2) from None
    except OSError as wrong:
        typer.echo(f"gradwire report: {wrong.filename} cannot be used: {wrong.strerror}; name another path", err=True)
        raise typer.Exit(2) from None
    except ModuleNotFoundError as missing:
        if missing.name not in ("altair", "vl_convert", "jinja2"):
            raise
        typer.echo("gradwire report: charts need two more packages; pip install 'gradwire[report]'", err=True)
        raise typer.Exit(1) from None


def _runs_in(paths: list[Path]) -> list[Path]:
    """Their run folders; paths without one are named and passed over, unless there is no other."""
    folders, empty = sort_out(paths)
    if not folders:
        raise ValueError(nothing_in(empty))
    beside = {folder.parent.resolve() for folder in folders}  # runs/* names the results of `gradwire compare` as well
    empty = [path for path in empty if not (path.is_file() and path.parent.resolve() in beside)]
    if empty:
        typer.echo(f"gradwire report: there is no run in {', '.join(map(str, empty))}; passed over", err=True)
    return folders


def _write_page(found: "list[Task]", path: Path, title: str) -> None:
    from gradwire_lab.report.page import page

    text = page(found, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    typer.echo(f"{path}: {len(text.encode()) / 1e6:.2f} MB, opens in any browser, loads nothing")


def _write_pictures(found: "list[Task]", folder: Path, kind: str) -> None:
    from gradwire_lab.report.pictures import pictures

    for path in pictures(found, folder, "png" if kind == "png" else "svg"):
        typer.echo(str(path))


def _write_tables(found: "list[Task]", path: Path) -> None:
    if str(path) == "-":
        typer.echo(tables(found), nl=False)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tables(found, path.parent), encoding="utf-8")
    typer.echo(str(path))
