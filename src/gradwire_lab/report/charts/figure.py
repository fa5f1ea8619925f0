"""A figure, its colors, and the look that all charts share."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from string import Template
from typing import Any

import altair as alt

from gradwire_lab.report.run_groups import Group, Task

# Okabe and Ito's colors, which people with any color vision tell apart, less the two that fade on white or on black.
# Further groups repeat them with another shape or dash.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
DENSE_COLOR = "#7F7F7F"
SHAPES = ("circle", "square", "triangle-up", "diamond", "cross")
DASHES: tuple[tuple[int, ...], ...] = ((1, 0), (6, 3), (2, 2), (8, 2, 2, 2))

HEIGHT = 280
ROW_HEIGHT = 26
BOUND = 10  # pixels that a label may reach beyond its axis: less than the padding of a file, which would cut it
_LETTER, _SYMBOL = 6.2, 30  # pixels of a letter in a legend, and of the symbol before a name and the gap behind it
_AXIS = 60  # pixels of an axis of numbers, with its title

Row = Mapping[str, Any]
Chart = alt.Chart | alt.LayerChart | alt.FacetChart  # as Altair types the sum of layers


@dataclass(frozen=True)
class Figure:
    """One chart and the words around it."""

    name: str
    title: str
    caption: str
    chart: Chart


def chart(rows: Sequence[Row]) -> alt.Chart:
    return alt.Chart(alt.InlineData(values=list(rows)))


def tooltips(titles: Mapping[str, str]) -> list[alt.Tooltip]:
    """What a pointer shows: titles by field, such as ``group`` or, with a type and a format, ``ms:Q .3g``."""
    found = []
    for text, title in titles.items():
        field, _, form = text.partition(" ")
        field = field if ":" in field else f"{field}:N"
        found.append(alt.Tooltip(field, title=title, format=form) if form else alt.Tooltip(field, title=title))
    return found


def bytes_axis(field: str, title: str) -> alt.X:
    """Bytes on a log scale, written as kB, MB and so on."""
    text = "datum.label ? datum.label + 'B' : ''"
    axis = alt.Axis(format="~s", labelExpr=text, tickCount=6, grid=False, labelBound=BOUND)
    return alt.X(f"{field}:Q", title=f"{title} (log)", scale=alt.Scale(type="log", nice=False, padding=24), axis=axis)


def finish(made: Chart, height: int = HEIGHT) -> Chart:
    return made.properties(width="container", height=height)


def legend(names: Sequence[str], beside: Sequence[str] = ()) -> alt.Legend:
    """Below the chart, in as many columns as the names leave room for: on a narrow page in one.

    ``beside`` are the names left of the plot, if it has some. A page's own width decides, since that of the plot
    changes after the height for the legend is fixed.
    """
    entry = max(map(len, names)) * _LETTER + _SYMBOL
    axis = max([_AXIS, *(len(name) * _LETTER for name in beside)])
    room = f"(isValid(containerSize()[0]) ? containerSize()[0] - {axis:.0f} : width)"
    columns = alt.expr(f"clamp(floor({room} / {entry:.0f}), 1, 4)")
    return alt.Legend(title=None, orient="bottom", columns=columns, labelLimit=400, symbolOpacity=1)


def colors(task: Task) -> alt.Scale:
    """One color for each group, the first dense one gray."""
    gray = next((group for group in task.groups if group.dense), None)
    rest = iter(range(len(task.groups)))
    given = [DENSE_COLOR if group is gray else COLORS[next(rest) % len(COLORS)] for group in task.groups]
    return alt.Scale(domain=labels(task.groups), range=given)


def color(task: Task) -> alt.Color:
    return alt.Color("group:N", scale=colors(task), legend=legend(labels(task.groups)))


def shape(task: Task) -> alt.Shape:
    scale = alt.Scale(domain=labels(task.groups), range=_cycled(task, SHAPES))
    return alt.Shape("group:N", scale=scale, legend=legend(labels(task.groups)))


def dash(task: Task) -> alt.StrokeDash:
    scale = alt.Scale(domain=labels(task.groups), range=[list(one) for one in _cycled(task, DASHES)])
    return alt.StrokeDash("group:N", scale=scale, legend=legend(labels(task.groups)))


def labels(groups: Sequence[Group]) -> list[str]:
    return [group.label for group in groups]


def seeds(task: Task) -> str:
    """How many seeds stand behind the means, in words."""
    counts = {len(group.runs) for group in task.groups}
    if counts == {1}:
        return "one seed each"
    return f"means of {min(counts)} seeds" if len(counts) == 1 else f"means of {min(counts)} to {max(counts)} seeds"


def left_out(counts: Mapping[str, int], what: str) -> str:
    """A sentence on what a chart cannot show, by group; empty if that is nothing."""
    numbers = ", ".join(f"{count:,} of {label}" for label, count in counts.items() if count)
    return f" Left out, as {what}: {numbers}." if numbers else ""


def _cycled(task: Task, kinds: Sequence[Any]) -> list[Any]:
    """The first kind while the colors last, then the next."""
    return [kinds[i // (len(COLORS) + 1) % len(kinds)] for i in range(len(task.groups))]


def look(ink: str = "#1c1e21", soft: str = "#5d636b", faint: str = "#e3e5e8", paper: str = "#ffffff") -> dict[str, Any]:
    """The configuration of a chart; the page makes the same from its style sheet, for light and dark."""
    text = (resources.files("gradwire_lab.report.charts") / "look.json").read_text(encoding="utf-8")
    config: dict[str, Any] = json.loads(Template(text).substitute(ink=ink, soft=soft, faint=faint, paper=paper))
    return config
