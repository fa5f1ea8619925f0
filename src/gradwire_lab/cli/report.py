"""``gradwire report RUNS...``: one page, pictures or markdown tables from run folders."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from gradwire_lab.cli.options import ChartFormat
from gradwire_lab.cli.output import needing_charts, refusing
from gradwire_lab.report import table
from gradwire_lab.report.load import LOG, find, load
from gradwire_lab.report.run_groups import Group, Task, tasks
from gradwire_lab.train.compare import arms
from gradwire_lab.train.spec_lists import split_specs

PAGE = Path("report.html")


def report(
    runs: Annotated[list[Path], typer.Argument(help="Run folders, or folders that hold some.")],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="The file of the page; report.html if no option names an output."),
    ] = None,
    title: Annotated[str, typer.Option(help="Title of the page.")] = "gradwire report",
    png: Annotated[Path | None, typer.Option(help="A folder for the charts as PNG; no browser needed.")] = None,
    svg: Annotated[Path | None, typer.Option(help="A folder for the charts as SVG.")] = None,
    markdown: Annotated[Path | None, typer.Option(help="A file for tables in Markdown; - prints them.")] = None,
    latex: Annotated[
        Path | None, typer.Option(help="A file for tables in LaTeX, with the package booktabs; - prints them.")
    ] = None,
    all_columns: Annotated[
        bool, typer.Option("--all-columns", help="Keep all columns in LaTeX, also those that papers seldom print.")
    ] = False,
    kind: Annotated[
        list[ChartFormat] | None,
        typer.Option("--format", help="Write charts as pdf, svg or png into --figures. May be repeated."),
    ] = None,
    figures: Annotated[Path, typer.Option(help="The folder for charts of --format.")] = Path("figures"),
    width: Annotated[int, typer.Option(min=100, max=5000, help="Width of chart files, in pixels of 1/72 inch.")] = 560,
    specs: Annotated[str, typer.Option(help="Show only these specs, separated by semicolons.")] = "",
    titles: Annotated[
        bool, typer.Option("--title-in-figures/--no-title", help="Draw titles and captions into charts.")
    ] = True,
    all_versions: Annotated[
        bool, typer.Option("--all-versions", help="Also show runs of earlier versions of a model or data file.")
    ] = False,
) -> None:
    """Write one self-contained HTML page about some runs, or charts and tables for a paper."""
    with refusing("report", ValueError, OSError), needing_charts("report"):
        every = tasks([load(folder) for folder in _runs_in(runs)])
        found = _chosen(every if all_versions else _latest(every), split_specs(specs))
        if not found:
            raise ValueError("no run has finished an epoch yet, so there is nothing to report")
        for path, write in (
            (markdown, table.markdown_with_note),
            (latex, partial(table.latex, every_column=all_columns)),
        ):
            if path is not None:
                _write_tables(found, path, write)
        wanted = [(png, "png"), (svg, "svg"), *((figures, one.value) for one in kind or ())]
        for folder, name in wanted:
            if folder is not None:
                _write_pictures(found, folder, name, width, titles)
        if output is not None or not (markdown or latex or png or svg or kind):
            _write_page(found, output or PAGE, title)


def _latest(found: list[Task]) -> list[Task]:
    """The tasks of the latest version of the user's files; says how many others there are."""
    earlier = [task for task in found if not task.latest]
    if earlier:
        runs = sum(len(group.runs) for task in earlier for group in task.groups)
        versions = len({task.version for task in earlier})
        typer.echo(
            f"gradwire report: {runs} run{'s' * (runs != 1)} of {versions} earlier version{'s' * (versions != 1)} of a "
            "model or data file are left out; --all-versions shows them",
            err=True,
        )
    return [task for task in found if task.latest]


def _chosen(found: list[Task], specs: list[str]) -> list[Task]:
    """The tasks with the groups of these specs alone; with all of them where none is named."""
    if not specs:
        return found
    known = [group for task in found for group in task.groups]
    for spec in specs:
        if not any(_is(group, spec) for group in known):
            names = "; ".join(dict.fromkeys(group.label for group in known))
            raise ValueError(f"no run has the spec {spec!r}; there are {names}")
    kept = [
        replace(task, groups=tuple(group for group in task.groups if any(_is(group, spec) for spec in specs)))
        for task in found
    ]
    return [task for task in kept if task.groups]


def _is(group: Group, spec: str) -> bool:
    known = group.label.replace(" ", ""), group.spec.replace(" ", "")
    return any(name.replace(" ", "") in known for name in (spec, _label_of(spec)))


def _label_of(spec: str) -> str:
    """``int4, exchange two_way`` for ``int4; exchange=two_way``, as `gradwire compare` takes it."""
    (arm,) = arms(spec)
    settings = (setting.partition("=") for setting in arm.overrides)
    return ", ".join([arm.spec, *(f"{key.rpartition('.')[2]} {value}" for key, _, value in settings)])


def _runs_in(paths: list[Path]) -> list[Path]:
    """Their run folders; paths without one are named and passed over, unless there is no other."""
    folders, empty = find(paths)
    if not folders:
        raise ValueError(f"there is no run in {', '.join(map(str, empty))}; a run folder holds a {LOG}")
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


def _write_pictures(found: list[Task], folder: Path, kind: str, width: int, titles: bool) -> None:
    from gradwire_lab.report.page import pictures

    for path in pictures(found, folder, cast(Any, kind), width, titles):
        typer.echo(str(path))


def _write_tables(found: list[Task], path: Path, write: Callable[[list[Task], Path], str]) -> None:
    if str(path) == "-":
        typer.echo(write(found, Path()), nl=False)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(write(found, path.parent), encoding="utf-8")
    typer.echo(str(path))
