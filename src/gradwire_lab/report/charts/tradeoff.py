"""Accuracy against bytes, and the Pareto front."""

import math
from collections.abc import Sequence
from typing import Literal

import altair as alt

from gradwire_lab.report.charts.figure import (
    Chart,
    Figure,
    Row,
    bytes_axis,
    chart,
    color,
    finish,
    left_out,
    seeds,
    shape,
    tooltips,
)
from gradwire_lab.report.numbers import in_bytes, mean_and_spread, ratio, rounded
from gradwire_lab.report.run_groups import Group, Task, front

Spot = tuple[Literal["left", "right", "center"], int, int]
CHARACTER, LINE = 6.2, 14  # pixels of a name's letters, and of its height
PLOT_WIDTH, PLOT_HEIGHT = 480, 250  # about; on a narrower page names may meet, and the legend has them too
# Where a name may stand beside its point: alignment, and pixels to the right and down.
SPOTS: tuple[Spot, ...] = (
    ("left", 9, -8),
    ("left", 9, 10),
    ("right", -9, -8),
    ("right", -9, 10),
    ("center", 0, -16),
    ("center", 0, 18),
)
Box = tuple[float, float, float, float]  # left, top, right, bottom


def metric_over_bytes(task: Task) -> Figure | None:
    rows = [row for group in task.groups if (row := _row(task, group))["sent"] and row["value"] is not None]
    if not rows:
        return None
    best = front([(row["sent"], row["value"]) for row in rows], task.metric)
    line = [{**rows[i], "order": order} for order, i in enumerate(best)]
    return Figure(
        "metric-over-bytes",
        f"{task.metric.title.capitalize()} against bytes sent by each rank",
        f"At the end of training, {seeds(task)}; bars are 95 % t-intervals of the means. Dotted: the Pareto "
        "front, whose points none beats that sends as little. Counted is all that a rank sent, agreements and padding "
        "included."
        + left_out({group.label: len(group.runs) * bool(group.diverged) for group in task.groups}, "diverged"),
        finish(_chart(task, rows, line)),
    )


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


def _chart(task: Task, rows: Sequence[Row], line: Sequence[Row]) -> Chart:
    x = bytes_axis("sent", "bytes sent by each rank")
    y = alt.Y("value:Q", title=task.metric.axis, scale=alt.Scale(zero=False, padding=16))
    chosen = alt.selection_point(fields=["group"], bind="legend")
    visible = alt.when(chosen).then(alt.value(1)).otherwise(alt.value(0.15))
    stairs = chart(line).mark_line(style="front", strokeDash=[2, 3], interpolate="step-after", strokeWidth=1.5)
    spans = chart(rows).mark_rule(strokeWidth=1.5).encode(x, alt.Y("low:Q"), alt.Y2("high:Q"), color(task))
    titles = {"group": "spec", "text": task.metric.axis, "bytes": "sent by each rank"}
    titles |= {"payload": "payload ratio", "wire": "wire ratio"}
    points = chart(rows).mark_point(filled=True, size=110, opacity=1)
    points = points.encode(x, y, color(task), shape(task), tooltip=tooltips(titles))
    names = [
        chart([row]).mark_text(align=align, dx=dx, dy=dy).encode(x, y, alt.Text("group:N"))
        for row, (align, dx, dy) in placed(rows)
    ]
    return alt.layer(
        stairs.encode(x, y, alt.Order("order:Q")),
        spans.encode(opacity=visible),
        points.encode(opacity=visible).add_params(chosen),
        *names,
    )


def placed(rows: Sequence[Row]) -> list[tuple[Row, Spot]]:
    """The names that can stand beside their points, and where, so that none lies on another or on a point.

    The first rows choose first. A name without room is left to the legend.
    """
    points = _pixels(rows)
    taken: list[Box] = [(x - 6, y - 6, x + 6, y + 6) for x, y in points]
    found = []
    for row, (x, y) in zip(rows, points, strict=True):
        width = CHARACTER * len(row["group"])
        for align, dx, dy in SPOTS:
            left = x + dx - {"left": 0.0, "right": width, "center": width / 2}[align]
            box = left, y + dy - LINE / 2, left + width, y + dy + LINE / 2
            inside = box[0] >= -30 and box[2] <= PLOT_WIDTH + 60
            if inside and not any(_overlap(box, other) for other in taken):
                taken.append(box)
                found.append((row, (align, dx, dy)))
                break
    return found


def _pixels(rows: Sequence[Row]) -> list[tuple[float, float]]:
    """Where points are drawn, about."""
    across, up = [math.log(row["sent"]) for row in rows], [row["value"] for row in rows]
    width, height = max(across) - min(across) or 1.0, max(up) - min(up) or 1.0
    return [
        (PLOT_WIDTH * (x - min(across)) / width, PLOT_HEIGHT * (max(up) - y) / height)
        for x, y in zip(across, up, strict=True)
    ]


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
