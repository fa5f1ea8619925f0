"""Accuracy against bytes, and the specs of which none is both smaller and better: the Pareto front."""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import altair as alt

from gradwire_lab.report.charts import figure
from gradwire_lab.report.charts.figure import Chart, Figure, Row
from gradwire_lab.report.numbers import in_bytes, mean_and_spread, ratio, rounded
from gradwire_lab.report.run_groups import Group, Task, front
from gradwire_lab.report.statistics import Estimate
from gradwire_lab.report.summary import best, headline

Spot = tuple[Literal["left", "right", "center"], float, float]
CHARACTER, LINE = 6.2, 14  # pixels of a name's letters, and of its height
PLOT_WIDTH, PLOT_HEIGHT = 480, 250  # of a page, about
SIDE, BEYOND = 24, 36  # pixels between the plot's sides and its outermost points, and from these to the file's edge
# Where a name may stand beside its point: alignment, and pixels to the right and down.
SPOTS: tuple[Spot, ...] = (
    ("left", 9, -8),
    ("left", 9, 10),
    ("right", -9, -8),
    ("right", -9, 10),
)
_FRONT = (
    "The dotted line joins the specs worth choosing from (the Pareto front): each next one sends more bytes, and is "
    "better by more than the intervals."
)
_NO_FRONT = (
    "There is no dotted line of specs worth choosing from (a Pareto front): no spec that sends more bytes is better by "
    "more than the intervals."
)
_ONE_SEED = "There is no dotted line of specs worth choosing from (a Pareto front): it takes two seeds or more of each."
NARROWEST = 0.8  # of the width that names are placed for
Box = tuple[float, float, float, float]  # left, top, right, bottom


def metric_over_bytes(task: Task, width: int = PLOT_WIDTH) -> Figure | None:
    """``width`` is that of the plot in pixels, which decides about the places of names."""
    made = [(_row(task, group), group.estimate) for group in task.groups]
    drawn = [(row, value) for row, value in made if row["sent"] and row["value"] is not None]
    if not drawn:
        return None
    rows = [row for row, _ in drawn]
    edge = front([(row["sent"], value) for row, value in drawn], task.metric)
    edge = edge if len(edge) > 1 else []  # one point is no front
    line = [{**rows[i], "order": order} for order, i in enumerate(edge)]
    return Figure(
        "metric-over-bytes",
        f"{task.metric.title.capitalize()} against bytes sent by each rank",
        f"{headline(task)} At the end of training, {figure.seeds(task)}; bars are 95 % t-intervals of the means. "
        f"{_front_note(edge, drawn)} Bytes are all that a rank sent, agreements and padding included."
        + figure.left_out({group.label: len(group.runs) * bool(group.diverged) for group in task.groups}, "diverged"),
        figure.finish(_chart(task, rows, line, width)),
    )


def _front_note(edge: Sequence[int], drawn: Sequence[tuple[Row, Estimate]]) -> str:
    """What the dotted line is, or why there is none."""
    if edge:
        return _FRONT
    return _NO_FRONT if sum(value.low is not None for _, value in drawn) > 1 else _ONE_SEED


def _row(task: Task, group: Group) -> Row:
    interval = group.estimate.within(task.metric.least, task.metric.most)
    return {
        "group": group.label,
        "value": rounded(group.estimate.mean),
        "low": rounded(interval.mean if interval.low is None else interval.low),
        "high": rounded(interval.mean if interval.high is None else interval.high),
        "sent": rounded(group.mean("sent")),
        "text": mean_and_spread(group.estimate),
        "bytes": in_bytes(group.mean("sent") or 0),
        "payload": ratio(group.mean("payload_ratio") or 1),
        "wire": ratio(group.wire_ratio or 1),
    }


def _chart(task: Task, rows: Sequence[Row], line: Sequence[Row], width: int) -> Chart:
    x = figure.bytes_axis("sent", "bytes sent by each rank")
    y = alt.Y("value:Q", title=task.metric.axis, scale=alt.Scale(zero=False, nice=False, padding=16))
    chosen = alt.selection_point(fields=["group"], bind="legend")
    visible = alt.when(chosen).then(alt.value(1)).otherwise(alt.value(0.15))
    stairs = figure.chart(line).mark_line(style="front", strokeDash=[2, 3], interpolate="step-after", strokeWidth=1.5)
    fronts = [stairs.encode(x, y, alt.Order("order:Q"))] if line else []  # a browser warns of a layer without data
    hue = figure.color(task)
    spans = figure.chart(rows).mark_rule(strokeWidth=1.5).encode(x, alt.Y("low:Q"), alt.Y2("high:Q"), hue)
    titles = {"group": "spec", "text": task.metric.axis, "bytes": "sent by each rank"}
    titles |= {"payload": "payload ratio", "wire": "wire ratio, sent and received"}
    points = figure.chart(rows).mark_point(filled=True, size=110, opacity=1)
    points = points.encode(x, y, hue, figure.shape(task), tooltip=figure.tooltips(titles))
    roomy = alt.expr(f"width < {NARROWEST * width:.0f} ? 0 : 1")  # on a narrower page the legend has the names
    names = [
        figure.chart([row]).mark_text(align=align, dx=dx, dy=dy, opacity=roomy).encode(x, y, alt.Text("group:N"))
        for row, (align, dx, dy) in _named(task, rows, line, width)
    ]
    return alt.layer(
        *fronts,
        spans.encode(opacity=visible),
        points.encode(opacity=visible).add_params(chosen),
        *names,
    )


def _named(task: Task, rows: Sequence[Row], line: Sequence[Row], width: int) -> list[tuple[Row, Spot]]:
    """The places of names: the best spec chooses first, then the front. Without room for the best there are none."""
    chosen, edge = best(task), [row["group"] for row in line]
    wanted = chosen.label if chosen else ""
    ranked = sorted(rows, key=lambda row: (row["group"] != wanted, row["group"] not in edge))
    found = placed(ranked, width - 2 * SIDE, edge)
    return found if not wanted or any(row["group"] == wanted for row, _ in found) else []


def placed(rows: Sequence[Row], width: int = PLOT_WIDTH, edge: Sequence[str] = ()) -> list[tuple[Row, Spot]]:
    """The names that can stand beside their points, and where, so that none lies on another, a point, a bar or a line.

    The first rows choose first. A name without room is left to the legend. ``edge`` are the specs that the line joins.
    """
    points = _pixels(rows, width)
    by_name = {row["group"]: point[:2] for row, point in zip(rows, points, strict=True)}
    taken: list[Box] = [(x - 6, y - 6, x + 6, y + 6) for x, y, _, _ in points]
    taken += [(x - 2, high, x + 2, low) for x, _, high, low in points]
    for (x, y), (right, up) in pairwise(by_name[name] for name in edge):
        taken += [(x, y - 1, right, y + 1), (right - 1, min(y, up), right + 1, max(y, up))]
    found = []
    for row, (x, y, high, low) in zip(rows, points, strict=True):
        length = CHARACTER * len(row["group"])
        for align, dx, dy in (*SPOTS, ("center", 0, high - y - 10), ("center", 0, low - y + 12)):
            left = x + dx - {"left": 0.0, "right": length, "center": length / 2}[align]
            box = left, y + dy - LINE / 2, left + length, y + dy + LINE / 2
            inside = box[0] >= -30 and x + (box[2] - x) / NARROWEST <= width + BEYOND
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                found.append((row, (align, dx, dy)))
                break
    return found


def _pixels(rows: Sequence[Row], width: int) -> list[tuple[float, float, float, float]]:
    """Where points are drawn, about: to the right, and down, of the value and of the ends of its bar."""
    across = [math.log(row["sent"]) for row in rows]
    top, bottom = max(row["high"] for row in rows), min(row["low"] for row in rows)
    span, height = max(across) - min(across) or 1.0, top - bottom or 1.0
    down = [[PLOT_HEIGHT * (top - row[name]) / height for name in ("value", "high", "low")] for row in rows]
    return [(width * (x - min(across)) / span, *ys) for x, ys in zip(across, down, strict=True)]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
