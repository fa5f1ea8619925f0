"""``gradwire report RUNS...``: one page, pictures or markdown tables from run folders."""

from pathlib import Path
from typing import Annotated

import typer

from gradwire_lab.cli.output import needing_charts, refusing
from gradwire_lab.report.load import load, nothing_in, sort_out
from gradwire_lab.report.run_groups import Task, tasks
from gradwire_lab.report.table import markdown as tables

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
    with refusing("report", ValueError, OSError), needing_charts("report"):
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


def _runs_in(paths: list[Path]) -> list[Path]:
    """Their run folders; paths without one are named and passed over, unless there is no other."""
    folders, empty = sort_out(paths)
    if not folders:
        raise ValueError(nothing_in(empty))
    parents = {folder.parent.resolve() for folder in folders}  # runs/* names the results of `gradwire compare` as well
    empty = [path for path in empty if not (path.is_file() and path.parent.resolve() in parents)]
    if empty:
        typer.echo(f"gradwire report: there is no run in {', '.join(map(str, empty))}; passed over", err=True)
    return folders


def _write_page(found: list[Task], path: Path, title: str) -> None:
    from gradwire_lab.report.page import page

    text = page(found, title)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    typer.echo(f"{path}: {len(text.encode()) / 1e6:.2f} MB, opens in any browser, loads nothing")


def _write_pictures(found: list[Task], folder: Path, kind: str) -> None:
    from gradwire_lab.report.pictures import pictures

    for path in pictures(found, folder, "png" if kind == "png" else "svg"):
        typer.echo(str(path))


def _write_tables(found: list[Task], path: Path) -> None:
    if str(path) == "-":
        typer.echo(tables(found), nl=False)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tables(found, path.parent), encoding="utf-8")
    typer.echo(str(path))
