"""Output: the tables and refusals that all commands share."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich.console import Console, RenderableType
from rich.table import Table

_WIDTH = 150  # where no terminal shows it


def make_table(title: str, columns: Sequence[str], left: Sequence[str], **options: Any) -> Table:
    """An empty table; columns are right-aligned, but for those of ``left``."""
    table = Table(title=title)
    for column in columns:
        table.add_column(column, justify="left" if column in left else "right", **options)
    return table


def show(*parts: RenderableType, width: int = _WIDTH) -> None:
    """Print for a terminal, or in a fixed width."""
    console = Console(width=None if sys.stdout.isatty() else width)
    for part in parts:
        console.print(part)


def refuse(command: str, wrong: object, code: int = 2) -> NoReturn:
    """Say what is wrong, and exit."""
    typer.echo(f"gradwire {command}: {wrong}", err=True)
    raise typer.Exit(code) from None


@contextmanager
def refusing(command: str, *errors: type[Exception], code: int = 2) -> Iterator[None]:
    """These errors are a sentence and an exit code, not a traceback."""
    try:
        yield
    except errors as wrong:
        refuse(command, wrong, code)
