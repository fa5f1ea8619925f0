"""The page of a simulated grid: maps of speed-ups, and every cell in a table."""

from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

from gradwire_lab.report.charts.figure import Figure
from gradwire_lab.report.charts.heatmap import speedups
from gradwire_lab.report.numbers import in_seconds, ratio
from gradwire_lab.report.page import Section, bound, spec
from gradwire_lab.report.slug import slug
from gradwire_lab.report.summary import Cell, Column

Row = Mapping[str, Any]

COLUMNS = (
    Column("model", numeric=False),
    Column("batch", numeric=False),
    Column("workers"),
    Column("link", numeric=False),
    Column("float32 DDP"),
    Column("bfloat16 DDP"),
    Column("exposed"),
    Column("auto takes", numeric=False),
    Column("step"),
    Column("faster"),
    Column("fastest that compresses", numeric=False),
    Column("its step"),
    Column("gossip"),
)


def page(places: Mapping[str, Sequence[Row]], note: str, title: str = "gradwire simulate") -> str:
    """Grids by name, each a list of rows."""
    drawn = {place: _figures(rows, place) for place, rows in places.items()}
    specs = {figure.name: spec(figure) for figures in drawn.values() for figure in figures}
    maps = [_maps(place, rows, drawn[place], note) for place, rows in places.items()]
    tables = [_table(place, rows) for place, rows in places.items()]
    cells = sum(map(len, places.values()))
    return bound(title, f"{cells} cells; nothing on this page was measured on a cluster", [*maps, *tables], specs)


def _figures(rows: Sequence[Row], place: str) -> list[Figure]:
    links = list(dict.fromkeys(row["link"] for row in rows))
    return [
        speedups(list(same), links, place) for _, same in groupby(rows, key=lambda row: (row["model"], row["batch"]))
    ]


def _maps(place: str, rows: Sequence[Row], figures: Sequence[Figure], note: str) -> Section:
    lost = sum(bool(row["compression_loses"]) for row in rows)
    dense = sum(row["choice"].startswith("ddp-") for row in rows)
    said = (
        f"In {lost} of {len(rows)} cells nothing that compresses beats the better dense DDP. In {dense}, auto stays "
        f"dense: there, or since what looks faster might not be. {note}"
    )
    captions = [{"key": one.name, "title": one.title, "caption": one.caption} for one in figures]
    return Section(slug(place), place, said, (), (), captions, ())


def _table(place: str, rows: Sequence[Row]) -> Section:
    title = f"Every cell, {place}"
    return Section(slug(title), title, "", COLUMNS, [_cells(row) for row in rows], (), ())


def _cells(row: Row) -> list[Cell]:
    return [
        Cell(row["model"]),
        Cell(row["batch"]),
        Cell(f"{row['workers']:,}", row["workers"]),
        Cell(row["link"]),
        _time(row["ddp_fp32_seconds"]),
        _time(row["ddp_bf16_seconds"]),
        Cell(f"{row['exposed']:.0%}", row["exposed"]),
        Cell(row["choice"] + (" (cost assumed)" if row["assumed"] else "")),
        _time(row["seconds"]),
        Cell(ratio(row["speedup"]), row["speedup"]),
        Cell(row["fastest_compressed"] + (" (loses)" if row["compression_loses"] else "")),
        _time(row["fastest_compressed_seconds"]),
        _time(row["gossip_seconds"]),
    ]


def _time(seconds: float | None) -> Cell:
    return Cell("", "") if seconds is None else Cell(in_seconds(seconds), float(f"{seconds:.5g}"))
