"""Accuracy against bytes, and the Pareto front."""

from collections.abc import Sequence

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

MOST_NAMES = 6  # of points; where there are more, names would lie on top of each other, and the legend has them too


def metric_over_bytes(task: Task) -> Figure | None:
    rows = [row for group in task.groups if (row := _row(group))["sent"] and row["value"] is not None]
    if not rows:
        return None
    best = front([(row["sent"], row["value"]) for row in rows], task.metric)
    line = [{**rows[i], "order": order} for order, i in enumerate(best)]
    return Figure(
        "metric-over-bytes",
        f"{task.metric.title.capitalize()} against bytes sent by each rank",
        f"At the end of training, {seeds(task)}; bars span the seeds. Dotted: the Pareto front, whose points none "
        "beats that sends as little. Counted is all that a rank sent, agreements and padding included."
        + left_out({group.label: len(group.runs) * bool(group.diverged) for group in task.groups}, "diverged"),
        finish(_chart(task, rows, line)),
    )


def _row(group: Group) -> Row:
    values = list(group.values.values())
    return {
        "group": group.label,
        "value": rounded(group.estimate.mean),
        "low": rounded(min(values)),
        "high": rounded(max(values)),
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
    named = line if len(rows) <= MOST_NAMES else []
    names = chart(named).mark_text(align="left", dx=9, dy=-8).encode(x, y, alt.Text("group:N"))
    return alt.layer(
        stairs.encode(x, y, alt.Order("order:Q")),
        spans.encode(opacity=visible),
        points.encode(opacity=visible).add_params(chosen),
        names,
    )
