"""The same charts as PNG, SVG or PDF files, made without a browser."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import vl_convert

from gradwire_lab.report.charts import Figure, figures
from gradwire_lab.report.charts.figure import look
from gradwire_lab.report.page import spec
from gradwire_lab.report.run_groups import Task
from gradwire_lab.report.slug import slug

WIDTH = 560
Kind = Literal["png", "svg", "pdf"]


def pictures(tasks: Sequence[Task], folder: Path, kind: Kind, width: int = WIDTH, titled: bool = True) -> list[Path]:
    """Write every figure of every task, and say where.

    Args:
        tasks: Each has its figures.
        folder: Where the files go.
        kind: Their format.
        width: Of the plot, in pixels of 1/72 inch.
        titled: Whether a figure has its title and caption in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for task in tasks:
        for figure in figures(task, width):
            path = folder / f"{slug(task.name)}-{figure.name}.{kind}"
            path.write_bytes(_drawn(_whole(figure, width, titled), kind))
            written.append(path)
    return written


def _drawn(whole: dict[str, Any], kind: Kind) -> bytes:
    if kind == "png":
        return vl_convert.vegalite_to_png(whole, scale=2)
    return vl_convert.vegalite_to_pdf(whole) if kind == "pdf" else vl_convert.vegalite_to_svg(whole).encode()


def _whole(figure: Figure, width: int, titled: bool) -> dict[str, Any]:
    title = {"text": figure.title, "subtitle": textwrap.wrap(figure.caption, max(30, width * 90 // WIDTH))}
    head = {"title": title} if titled else {}
    return {**spec(figure), **head, "config": look(), "width": width, "padding": 12}
