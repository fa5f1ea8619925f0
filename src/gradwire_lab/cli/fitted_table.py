"""A table that fits a terminal: the columns that matter least are left out, and the caption names them."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from gradwire_lab.cli.output import make_table, stacked

_LINES = 2  # that the first cell of a row may take
_WIDEST_FIRST = 40  # beyond this width a first cell takes more lines, and no column is left out for it
_NARROWEST = 8  # of the first column
_GAP = 2  # between columns

Columns = dict[str, list[str]]  # cells by head


@dataclass(frozen=True)
class FittedTable:
    """Words, and to their right what is said of them: rows of two lines at most, while columns are left to spare.

    Attributes:
        title: Of the table.
        heads: Of the columns.
        rows: Their cells.
        spare: Heads of columns that may be left out, the first ones first.
        left: Heads of columns beside the first that hold words.
        caption: Below the table.
        elsewhere: What has all columns, beside a wider terminal.
    """

    title: str
    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    spare: Sequence[str] = ()
    left: Sequence[str] = ()
    caption: str = ""
    elsewhere: str = ""

    def __call__(self, width: int) -> Table:
        """The table for a terminal of this width."""
        columns = {head: [row[place] for row in self.rows] for place, head in enumerate(self.heads)}
        left_out: Columns = {}
        for head in (head for head in self.spare if head in columns):
            if _needed(columns) <= width:
                break
            left_out[head] = columns.pop(head)
        if not left_out and _first(columns) + _right_of_first(columns) + len(columns) + 3 <= width:
            return self._laid_out(columns, _first(columns))  # with room for a line between any two columns
        if _needed(columns) > width:
            return stacked(self._unfitted())
        noted = "\n".join(filter(None, (self.caption, self._note(left_out, width))))
        room = max(_NARROWEST, min(width - _right_of_first(columns), _first(columns)))
        table = replace(self, caption=noted)._laid_out(columns, room)
        table.box, table.show_edge, table.pad_edge, table.padding = SIMPLE_HEAD, False, False, (0, 1, 0, 0)
        return table

    def _unfitted(self) -> Table:
        table = make_table(escape(self.title), [escape(head) for head in self.heads], caption=escape(self.caption))
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def _laid_out(self, columns: Columns, room: int) -> Table:
        """With a first column of this width; all others are as wide as their cells."""
        first, *others = columns
        table = make_table(escape(self.title), (), caption=escape(self.caption) or None)
        table.add_column(escape(first), overflow="fold", width=room)
        for head in others:
            justify: Literal["left", "right"] = "left" if head in self.left else "right"
            table.add_column(escape(_wrapped(head, columns[head])), justify=justify, no_wrap=True)
        for row in zip(*columns.values(), strict=True):
            table.add_row(*map(escape, row))
        return table

    def _note(self, left_out: Columns, width: int) -> str:
        """Which columns are left out, with their values where these are the same in all rows."""
        if not left_out:
            return ""
        names = [f"{head} ({cells[0]})" if len(set(cells)) == 1 else head for head, cells in left_out.items()]
        places = " and ".join(filter(None, ("A wider terminal", self.elsewhere)))
        return f"Not shown in {width} columns: {', '.join(names)}. {places} {'have' if self.elsewhere else 'has'} them."


def _needed(columns: Columns) -> int:
    """How wide a table of these columns is at least."""
    return _least(next(iter(columns.values()))) + _right_of_first(columns)


def _first(columns: Columns) -> int:
    """How wide the first column is on one line."""
    head, cells = next(iter(columns.items()))
    return max(map(len, [head, *cells]))


def _right_of_first(columns: Columns) -> int:
    """How wide all columns but the first are, gaps included."""
    _, *others = columns.items()
    return sum(_GAP + max(map(len, [*_wrapped(head, cells).splitlines(), *cells])) for head, cells in others)


def _least(cells: Sequence[str]) -> int:
    """The width in which every cell takes two lines at most."""
    word = max((len(word) for cell in cells for word in cell.split()), default=0)
    fitting = (
        width
        for width in range(max(_NARROWEST, word), _WIDEST_FIRST)
        if all(len(textwrap.wrap(cell, width)) <= _LINES for cell in cells)
    )
    return next(fitting, _WIDEST_FIRST)


def _wrapped(head: str, cells: Sequence[str]) -> str:
    """A head in lines that are as long as the cells below it."""
    return "\n".join(textwrap.wrap(head, max(map(len, [*head.split(), *cells]))))
