"""Output: the tables and refusals that all commands share."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table

from gradwire_lab.train.time_left import TimeLeft

_WIDTH = 150  # where no terminal shows it
_LACKS_CHARTS = "charts need two more packages; pip install 'gradwire[report]'"


def make_table(
    title: str, columns: Sequence[str], left: Sequence[str] = (), caption: str | None = None, **options: Any
) -> Table:
    """An empty table; columns are right-aligned, but for those of ``left``."""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", **options)
    return table


def show(*parts: RenderableType | Callable[[int], Table], width: int = _WIDTH) -> None:
    """Print for a terminal, or in a fixed width. What is made for a width is made for this one."""
    console = Console(width=None if sys.stdout.isatty() else width, highlight=False)  # no colors inside of numbers
    for part in (part(console.width) if callable(part) else part for part in parts):
        unlimited = console.options.update(width=10_000)
        wide = isinstance(part, Table) and Measurement.get(console, unlimited, part).minimum > console.width
        console.print(stacked(part) if wide and isinstance(part, Table) else part)


def stacked(table: Table) -> Table:
    """A table whose rows stand below each other, one column a line, for terminals that are too narrow for it."""
    lines = Table(title=table.title, title_justify="left", show_header=False, box=None)
    lines.caption, lines.caption_justify = table.caption, "left"
    lines.add_column(no_wrap=True)
    lines.add_column(overflow="fold")
    for row in zip(*(column.cells for column in table.columns), strict=True):
        for column, cell in zip(table.columns, row, strict=True):
            lines.add_row(column.header, cell)
        lines.add_row("", "")
    return lines


class ResultRows:
    """Rows as they are measured: as JSON, a line each, or as a table at the end and progress on standard error.

    Where the number of rows is known beforehand, ``total``, progress has the time that is left.
    """

    def __init__(self, as_json: bool, table: Table, total: int = 0) -> None:
        self._as_json, self._table, self._left = as_json, table, TimeLeft(total)

    def add(self, row: dict[str, Any], cells: Sequence[str], progress: str = "") -> None:
        """One more row, the cells of the table that stand for it, and a line for those who wait."""
        self._left.finish()
        if self._as_json:
            typer.echo(json.dumps(row))
        elif progress:
            typer.echo(self._left.after(progress), err=True)
        self._table.add_row(*cells)

    def show(self, *notes: str, width: int = _WIDTH) -> None:
        """Print the table, and notes below it."""
        if not self._as_json:
            show(self._table, width=width)
            for note in notes:
                typer.echo(note)


def refuse(command: str, wrong: object, code: int = 2) -> NoReturn:
    """Say what is wrong, and exit."""
    if isinstance(wrong, OSError) and wrong.filename:
        wrong = f"cannot use {wrong.filename}: {wrong.strerror}; name another path"
    sys.stdout.flush()
    typer.echo(f"gradwire {command}: {wrong}", err=True)
    raise typer.Exit(code) from None


@contextmanager
def refusing(command: str, *errors: type[BaseException], code: int = 2) -> Iterator[None]:
    """These errors are a sentence and an exit code, not a traceback."""
    try:
        yield
    except errors as wrong:
        refuse(command, wrong, code)


@contextmanager
def needing_charts(command: str) -> Iterator[None]:
    """A package that draws charts and is not installed is a sentence, too."""
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name not in ("altair", "vl_convert", "jinja2"):
            raise
        refuse(command, _LACKS_CHARTS, 1)


def check_picture(path: Path | None) -> None:
    """Check what drawing needs before hours of measuring, not after.

    Raises:
        ValueError: A package or a folder is missing, or the file has another kind.
    """
    if path is None:
        return
    if not all(map(find_spec, ("altair", "vl_convert"))):
        raise ValueError(_LACKS_CHARTS)
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"a picture is a PNG or an SVG, but {path} is not; name it {path.stem or 'picture'}.png")
    if not path.parent.is_dir():
        raise ValueError(f"there is no folder {path.parent} for the picture; make it first")


def check_folder(option: str, folder: Path) -> None:
    """Check before hours of training that files can be written into a folder, which need not be there yet.

    Raises:
        ValueError: It cannot be made.
    """
    nearest = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise ValueError(f"{option} needs the folder {folder}, but {nearest} is a file; name another place")
    if not os.access(nearest, os.W_OK):
        raise ValueError(f"{option} needs the folder {folder}, but {nearest} may not be written to; name another place")
