"""The same charts as PNG or SVG files, made without a browser."""

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


def pictures(tasks: Sequence[Task], folder: Path, kind: Literal["png", "svg"]) -> list[Path]:
    """Write every figure of every task, and say where."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for task in tasks:
        for figure in figures(task):
            path = folder / f"{slug(task.name)}-{figure.name}.{kind}"
            path.write_bytes(_drawn(figure, kind))
            written.append(path)
    return written


def _drawn(figure: Figure, kind: Literal["png", "svg"]) -> bytes:
    if kind == "png":
        return vl_convert.vegalite_to_png(_whole(figure), scale=2)
    return vl_convert.vegalite_to_svg(_whole(figure)).encode()


def _whole(figure: Figure) -> dict[str, Any]:
    title = {"text": figure.title, "subtitle": textwrap.wrap(figure.caption, 90)}
    return {**spec(figure), "title": title, "config": look(), "width": WIDTH, "padding": 12}
