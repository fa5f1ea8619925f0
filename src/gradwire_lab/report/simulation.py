"""The page of a simulated grid: maps of speed-ups, and every cell in a table."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any

from gradwire_lab.report.charts.heatmap import speedups
from gradwire_lab.report.numbers import in_seconds, ratio
from gradwire_lab.report.page import Section, render
from gradwire_lab.report.slug import slug
from gradwire_lab.report.summary import TableCell, TableColumn

Row = Mapping[str, Any]


def _time(seconds: float | None) -> TableCell:
    return TableCell("", "") if seconds is None else TableCell(in_seconds(seconds), float(f"{seconds:.5g}"))


# By title: the cell of a row. What has no number to sort by is a word.
_READERS: dict[str, Callable[[Row], TableCell]] = {
    "model": lambda row: TableCell(row["model"]),
    "batch": lambda row: TableCell(row["batch"]),
    "workers": lambda row: TableCell(f"{row['workers']:,}", row["workers"]),
    "link": lambda row: TableCell(row["link"]),
    "float32 DDP": lambda row: _time(row["ddp_fp32_seconds"]),
    "bfloat16 DDP": lambda row: _time(row["ddp_bf16_seconds"]),
    "exposed": lambda row: TableCell(f"{row['exposed']:.0%}", row["exposed"]),
    "auto takes": lambda row: TableCell(row["choice"] + " (cost assumed)" * row["assumed"]),
    "step": lambda row: _time(row["seconds"]),
    "faster": lambda row: TableCell(ratio(row["speedup"]), row["speedup"]),
    "fastest that compresses": lambda row: TableCell(row["fastest_compressed"] + " (loses)" * row["compression_loses"]),
    "its step": lambda row: _time(row["fastest_compressed_seconds"]),
    "gossip": lambda row: _time(row["gossip_seconds"]),
}
_WORDS = ("model", "batch", "link", "auto takes", "fastest that compresses")
COLUMNS = tuple(TableColumn(title, title not in _WORDS) for title in _READERS)


def page(places: Mapping[str, Sequence[Row]], note: str, title: str = "gradwire simulate") -> str:
    """Grids by name, each a list of rows."""
    sections = [make(place, rows) for make in (partial(_maps, note), _table) for place, rows in places.items()]
    cells = sum(map(len, places.values()))
    return render(title, f"{cells} cells, all computed: nothing on this page was measured on a cluster", sections)


def _maps(note: str, place: str, rows: Sequence[Row]) -> Section:
    links = list(dict.fromkeys(row["link"] for row in rows))
    by_model = groupby(rows, key=lambda row: (row["model"], row["batch"]))
    lost = sum(bool(row["compression_loses"]) for row in rows)
    dense = sum(row["choice"].startswith("ddp-") for row in rows)
    note_text = (
        "Each cell is a predicted step: how many times faster the choice of auto is than bfloat16 DDP. Accuracy is not "
        f"in these figures. In {lost} of {len(rows)} cells no compression beats the better dense DDP. In {dense}, auto "
        f"stays dense, also where the gain is too uncertain. {note}"
    )
    return Section(slug(place), place, note_text, figures=[speedups(list(same), links) for _, same in by_model])


def _table(place: str, rows: Sequence[Row]) -> Section:
    title = f"Every cell, {place}"
    return Section(slug(title), title, "", COLUMNS, [[read(row) for read in _READERS.values()] for row in rows])
