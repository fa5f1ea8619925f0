"""Output: the tables and refusals that all commands share."""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.table import Table

_WIDTH = 150  # where no terminal shows it


def make_table(
    title: str, columns: Sequence[str], left: Sequence[str] = (), caption: str | None = None, **options: Any
) -> Table:
    """An empty table; columns are right-aligned, but for those of ``left``."""
    table = Table(title=title, title_justify="left", caption=caption, caption_justify="left")
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", **options)
    return table


def show(*parts: RenderableType, width: int = _WIDTH) -> None:
    """Print for a terminal, or in a fixed width."""
    console = Console(width=None if sys.stdout.isatty() else width)
    for part in parts:
        console.print(part)


class ResultRows:
    """Rows as they are measured: as JSON, a line each, or as a table at the end and progress on standard error."""

    def __init__(self, as_json: bool, table: Table) -> None:
        self._as_json, self._table = as_json, table

    def add(self, row: dict[str, Any], cells: Sequence[str], progress: str = "") -> None:
        """One more row, the cells of the table that stand for it, and a line for those who wait."""
        if self._as_json:
            typer.echo(json.dumps(row))
        elif progress:
            typer.echo(progress, err=True)
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
        wrong = f"{wrong.filename} cannot be used: {wrong.strerror}; name another path"
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
        refuse(command, "charts need two more packages; pip install 'gradwire[report]'", 1)
