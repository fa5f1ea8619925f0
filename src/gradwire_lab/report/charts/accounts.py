"""Where the bytes and the seconds of a step go."""

from collections.abc import Sequence

import altair as alt

from gradwire_lab.report.charts import figure
from gradwire_lab.report.charts.figure import Figure, Row
from gradwire_lab.report.machine_load import sentence
from gradwire_lab.report.numbers import in_bytes, ratio, rounded
from gradwire_lab.report.rule_names import in_words
from gradwire_lab.report.run_groups import Group, Task

PARTS = ("encode", "wire", "decode")
REST = "model, data, evaluation"
MOST_RULES = 8
MOST_LABELS = 24
HUES = (*figure.COLORS, figure.DENSE_COLOR)


def bytes_by_rule(task: Task) -> Figure | None:
    rows = [row for group in task.groups for row in _rule_rows(group)]
    if not rows:
        return None
    alone = len({row["rule"] for row in rows}) == 1
    rows = [{**row, "rule": in_words(str(row["rule"]), alone)} for row in rows]
    rules = list(dict.fromkeys(str(row["rule"]) for row in rows))
    palette = alt.Scale(domain=rules, range=[HUES[i % len(HUES)] for i in range(len(rules))])
    y = alt.Y("group:N", title=None, sort=figure.labels(task.groups), axis=alt.Axis(labelLimit=260))
    title = "bytes in a step"
    x = figure.bytes_axis("bytes", title)
    base = figure.chart(rows).encode(y, yOffset=alt.YOffset("rule:N", sort=rules))
    hue = alt.Color("rule:N", scale=palette, legend=figure.legend(rules, figure.labels(task.groups)))
    tips = figure.tooltips(_RULE_TIPS)
    drawn = alt.layer(
        base.mark_rule(strokeWidth=1.5, opacity=0.5).encode(x, alt.X2("dense:Q"), hue),
        base.mark_point(filled=False, size=50, opacity=1).encode(figure.bytes_axis("dense", title), hue, tooltip=tips),
        base.mark_point(filled=True, size=70, opacity=1).encode(x, hue, tooltip=tips),
    )
    lanes = len(task.groups) * max(1, len(rules) / 2)
    return Figure(
        "bytes-by-rule",
        "Bytes that a rank encodes in a step, by rule",
        "A rule sets how some tensors are compressed. Filled: encoded; hollow: the same gradients in float32. The "
        "longer the line, the higher the ratio.",
        figure.finish(drawn, 40 + round(figure.ROW_HEIGHT * lanes)),
    )


_RULE_TIPS = {"group": "spec", "rule": "rule", "text": "encoded", "dense_text": "in float32", "ratio": "payload ratio"}


def _rule_rows(group: Group) -> list[dict[str, float | str | None]]:
    """The mean over seeds of what each rule encoded in a step; small rules beyond a count are put together."""
    steps = group.mean("step") or 1
    totals: dict[str, tuple[float, float]] = {}
    for run in group.runs:
        for rule, (payload, dense) in run.last.get("rules", {}).items():
            before = totals.get(rule, (0.0, 0.0))
            totals[rule] = (before[0] + payload, before[1] + dense)
    ranked = sorted(totals.items(), key=lambda item: -item[1][1])
    if len(ranked) > MOST_RULES:
        rest = [sizes for _, sizes in ranked[MOST_RULES - 1 :]]
        ranked[MOST_RULES - 1 :] = [(f"{len(rest)} smaller rules", (sum(p for p, _ in rest), sum(d for _, d in rest)))]
    count = steps * len(group.runs)
    return [_rule_row(group, rule, payload / count, dense / count) for rule, (payload, dense) in ranked if payload]


def _rule_row(group: Group, rule: str, payload: float, dense: float) -> dict[str, float | str | None]:
    return {
        "group": group.label,
        "rule": rule,
        "bytes": rounded(payload),
        "dense": rounded(dense),
        "text": in_bytes(payload),
        "dense_text": in_bytes(dense),
        "ratio": ratio(dense / payload),
    }


def bytes_by_layer(task: Task) -> Figure | None:
    rows = [row for group in task.groups for row in _layer_rows(group)]
    if not rows:
        return None
    names = list(dict.fromkeys(str(row["layer"]) for row in rows))
    axis = alt.Axis(labels=len(names) <= MOST_LABELS, ticks=False, labelAngle=-45, labelLimit=90)
    scale = alt.Scale(type="log", nice=False, padding=12)
    text = "datum.label ? datum.label + 'B' : ''"
    between = "abs(log(datum.value) / LN10 - round(log(datum.value) / LN10)) > 0.001"
    lines = {"condition": {"test": between, "value": 0}, "value": 1}  # of the grid, at powers of ten alone
    heights = alt.Axis(format="~s", labelExpr=text, tickCount=5, gridOpacity=lines)
    drawn = (
        figure.chart(rows)
        .mark_point(filled=True, size=45, opacity=0.9)
        .encode(
            alt.X("layer:N", title="layer, roughly from the last to the first", sort=names, axis=axis),
            alt.Y("bytes:Q", title="bytes in a step (log)", scale=scale, axis=heights),
            figure.color(task),
            figure.shape(task),
            tooltip=figure.tooltips({"layer": "layer", "group": "spec", "text": "encoded"}),
        )
    )
    return Figure(
        "bytes-by-layer",
        "Bytes that a rank encodes in a step, by layer",
        "At the end of the run, in the order of sending: what each tensor takes, at most where the data decide; "
        "tensors that are compressed as one share its bytes by length.",
        figure.finish(drawn),
    )


def _layer_rows(group: Group) -> Sequence[Row]:
    layers = group.runs[0].last.get("layers", {})
    return [
        {"group": group.label, "layer": name, "bytes": rounded(size), "text": in_bytes(size)}
        for name, size in layers.items()
        if size
    ]


def step_time(task: Task) -> Figure | None:
    rows = [row for group in task.groups for row in _time_rows(group)]
    if not rows:
        return None
    order = [*PARTS, REST]
    drawn = (
        figure.chart(rows)
        .mark_bar(height={"band": 0.7})
        .encode(
            alt.Y("group:N", title=None, sort=figure.labels(task.groups), axis=alt.Axis(labelLimit=260)),
            alt.X("ms:Q", title="milliseconds in a step", stack="zero"),
            alt.Color(
                "part:N",
                scale=alt.Scale(domain=order, range=[figure.COLORS[0], figure.COLORS[1], figure.COLORS[2], "#B8BCC2"]),
                legend=figure.legend(order, figure.labels(task.groups)),
            ),
            alt.Order("order:Q"),
            tooltip=figure.tooltips({"group": "spec", "part": "part", "ms:Q .3~g": "ms in a step"}),
        )
    )
    return Figure(
        "step-time",
        "Where the time of a step goes",
        "Mean over all steps and seeds, on one rank: host time in encoding, in collectives and in decoding; the rest "
        "is the run's wall time less these." + sentence(run for group in task.groups for run in group.runs),
        figure.finish(drawn, 40 + figure.ROW_HEIGHT * len(task.groups)),
    )


def _time_rows(group: Group) -> Sequence[Row]:
    steps, wall = group.mean("step"), group.mean("seconds")
    spent = {part: group.mean(f"{part}_seconds") for part in PARTS}
    known = {part: seconds for part, seconds in spent.items() if seconds is not None}
    if not steps or wall is None or not known:
        return []
    known[REST] = max(0.0, wall - sum(known.values()))
    return [
        {"group": group.label, "part": part, "ms": rounded(1000 * seconds / steps), "order": order}
        for order, (part, seconds) in enumerate(known.items())
    ]
