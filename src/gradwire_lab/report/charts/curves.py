"""How a training went: over epochs, steps and time."""

from collections.abc import Callable, Sequence

import altair as alt

from gradwire_lab.report.charts.figure import (
    BOUND,
    Chart,
    Figure,
    Row,
    chart,
    color,
    dash,
    finish,
    left_out,
    seeds,
    tooltips,
)
from gradwire_lab.report.load import RunRecord
from gradwire_lab.report.machine_load import sentence
from gradwire_lab.report.numbers import rounded
from gradwire_lab.report.run_groups import Group, Task, grouped
from gradwire_lab.report.run_log import Record

POINTS = 6000  # of all curves of a chart together, so that the page stays small
FINEST = 120  # of one curve
FEW_POINTS = 30  # of one curve, which are then marked


def metric_curve(task: Task) -> Figure | None:
    band = "; the band spans the seeds" if any(len(group.runs) > 1 for group in task.groups) else ""
    caption = f"After each epoch, {seeds(task)}{band}."
    return _metric_figure(task, "metric-by-epoch", "by epoch", caption, "epoch", "epoch")


def metric_over_time(task: Task) -> Figure | None:
    caption = f"After each epoch, {seeds(task)}; seconds on the machine that ran it, evaluation included."
    caption += sentence(run for group in task.groups for run in group.runs)
    return _metric_figure(task, "metric-over-time", "against wall time", caption, "seconds", "wall time (s)")


def _metric_figure(task: Task, name: str, title: str, caption: str, key: str, across: str) -> Figure | None:
    rows = _by_epoch(task, lambda run, record: run.value(record), key)
    # Perplexity starts at the size of the vocabulary, and only a log scale shows its end as well.
    scale = alt.Scale(zero=False) if task.metric.larger_is_better else alt.Scale(type="log", nice=False)
    title = f"{task.metric.title.capitalize()} {title}"
    return _figure(task, name, title, caption, rows, across, task.metric.axis, scale)


def loss_curve(task: Task) -> Figure | None:
    count = max(10, min(FINEST, POINTS // len(task.groups)))
    rows = [row for group in task.groups for row in _loss_rows(group, count)]
    lost = {
        group.label: sum("loss" in r and r["loss"] is None for run in group.runs for r in run.steps)
        for group in task.groups
    }
    return _figure(
        task,
        "loss-by-step",
        "Training loss by step",
        f"Averages over neighboring steps, {seeds(task)}.{left_out(lost, 'no finite loss')}",
        rows,
        "step",
        "training loss",
        alt.Scale(zero=False),
    )


def consensus(task: Task) -> Figure | None:
    rows = _by_epoch(task, lambda _, record: float(record["consensus"]), needs="consensus")
    return _figure(
        task,
        "consensus-by-epoch",
        "Distance of the ranks from their mean, by epoch",
        "Root mean square over ranks of the distance between a rank's weights and the mean of all; gossip only.",
        [row for row in rows if row["value"]],
        "epoch",
        "consensus distance (log)",
        alt.Scale(type="log"),
    )


def _figure(
    task: Task, name: str, title: str, caption: str, rows: Sequence[Row], across: str, up: str, scale: alt.Scale
) -> Figure | None:
    if len(rows) < 2:
        return None
    return Figure(name, title, caption, finish(_lines(task, rows, across, up, scale)))


def _lines(task: Task, rows: Sequence[Row], across: str, up: str, scale: alt.Scale) -> Chart:
    x = alt.X(
        "x:Q", title=across, scale=alt.Scale(nice=False), axis=alt.Axis(grid=False, tickMinStep=1, labelBound=BOUND)
    )
    y = alt.Y("value:Q", title=up, scale=scale)
    chosen = alt.selection_point(fields=["group"], bind="legend")
    tips = tooltips({"group:N": "spec", "x:Q": across, "value:Q": up})
    shade = alt.when(chosen).then(alt.value(1)).otherwise(alt.value(0.12))
    # A dense line is wider, and lies below the others: one that follows it exactly does not hide it.
    dense = alt.FieldOneOfPredicate("group", [group.label for group in task.groups if group.dense])
    width = alt.when(dense).then(alt.value(4)).otherwise(alt.value(2))
    lines = chart(rows).mark_line().encode(x, y, color(task), dash(task), strokeWidth=width, opacity=shade)
    layers = [lines.add_params(chosen)]
    if len(rows) <= FEW_POINTS * len(task.groups):
        layers.append(chart(rows).mark_point(filled=True, size=28).encode(x, y, color(task), opacity=shade))
    # Fingers and mice need something larger than a line to point at.
    layers.append(chart(rows).mark_point(size=250, opacity=0).encode(x, y, tooltip=tips))
    spans = [row for row in rows if row["low"] != row["high"]]
    if spans:
        veil = alt.when(chosen).then(alt.value(0.15)).otherwise(alt.value(0))
        layers.insert(
            0, chart(spans).mark_area().encode(x, alt.Y("low:Q"), alt.Y2("high:Q"), color(task), opacity=veil)
        )
    return alt.layer(*layers)


def _by_epoch(
    task: Task, read: Callable[[RunRecord, Record], float], across: str = "epoch", needs: str = "value"
) -> list[Row]:
    """A row for each epoch of each group: the mean over seeds, and the span."""
    rows: list[Row] = []
    for group in task.groups:
        records = [(run, one) for run in group.runs for one in run.epochs if needs in one and across in one]
        by_epoch = grouped(records, lambda pair: float(pair[1]["epoch"]))
        for _, same in sorted(by_epoch.items()):
            rows.append(_row(group, [(float(record[across]), read(run, record)) for run, record in same]))
    return rows


def _loss_rows(group: Group, count: int) -> list[Row]:
    steps = [record for run in group.runs for record in run.steps if record.get("loss") is not None]
    if not steps:
        return []
    width = (max(int(record["step"]) for record in steps) + 1) / count
    points = [(float(record["step"]), float(record["loss"])) for record in steps]
    windows = sorted(grouped(points, lambda point: int(point[0] / width)).items())
    return [{**_row(group, same), "low": None, "high": None} for _, same in windows]


def _row(group: Group, points: list[tuple[float, float]]) -> dict[str, float | str | None]:
    values = [value for _, value in points]
    return {
        "group": group.label,
        "x": rounded(sum(x for x, _ in points) / len(points)),
        "value": rounded(sum(values) / len(values)),
        "low": rounded(min(values)),
        "high": rounded(max(values)),
    }
