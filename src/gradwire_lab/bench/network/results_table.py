"""Results table: what rows say together: multiples of the silent step, speed-ups, bytes, and a picture of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from gradwire_lab.bench.network.grid import Row, key_of
from gradwire_lab.bench.network.methods import DENSE

COLUMNS = ("model", "link", "ranks", "method", "ms", "x silent", "x dense", "sent/step", "NIC/step", "NIC/framed")


class MeasuredMethod(NamedTuple):
    """One measured cell, compared with the others.

    Attributes:
        row: As measured.
        multiple: Of the step that does not communicate, in the same run.
        speedup: Over the better of torch's dense ways in the same field, if one was measured.
        honest: NIC bytes over reported bytes after the framing model, where both are known.
    """

    row: Row
    multiple: float | None
    speedup: float | None
    honest: float | None


def results(rows: Sequence[Row]) -> list[MeasuredMethod]:
    """Every row, compared with the others. Multiples compare within one run, at one load."""
    return [_measured(row, rows) for row in rows]


def _measured(row: Row, rows: Iterable[Row]) -> MeasuredMethod:
    if "failed" in row:
        return MeasuredMethod(row, None, None, None)
    multiple = row["step_ms"] / row["silent_ms"]
    dense = [
        other["step_ms"] / other["silent_ms"]
        for other in rows
        if key_of(other)[:-1] == key_of(row)[:-1] and other["method"] in DENSE and "failed" not in other
    ]
    honest = row["nic"] / row["framed"] if row["nic"] and row["framed"] else None
    return MeasuredMethod(row, multiple, min(dense) / multiple if dense else None, honest)


def words(one: MeasuredMethod) -> tuple[str, ...]:
    """The cells of a table's row."""
    row = one.row
    start = (row["model"], row["link"], str(row["world"]), row["method"])
    if "failed" in row:
        return (*start, row["failed"].partition(":")[0], "", "", "", "", "")
    return (
        *start,
        f"{row['step_ms']:.1f}",
        f"{one.multiple:.2f}",
        "" if one.speedup is None else f"{one.speedup:.2f}",
        _bytes(row["reported"]),
        _bytes(row["nic"]),
        "" if one.honest is None else f"{one.honest:.3f}",
    )


def markdown(found: Sequence[MeasuredMethod]) -> str:
    """The table for a page."""
    rows = [
        COLUMNS,
        tuple("--:" if i in (2, *range(4, 10)) else "---" for i in range(len(COLUMNS))),
        *map(words, found),
    ]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def _bytes(n: float | None) -> str:
    if n is None:
        return ""
    return f"{n / 1e6:.2f} MB" if n >= 1e6 else f"{n / 1e3:.1f} kB"


def picture(found: Sequence[MeasuredMethod], path: Path) -> None:
    """Multiples of the silent step by link and method, as PNG or SVG by the file's name."""
    import altair as alt

    values = [
        {"field": f"{one.row['model']}, {one.row['world']} ranks", **one.row, "multiple": one.multiple}
        for one in found
        if one.multiple is not None
    ]
    for value in values:
        value.pop("pace", None)
    links = alt.Scale(domain=list(dict.fromkeys(value["link"] for value in values)))  # a sort would part the legends
    points = (
        alt.Chart(alt.InlineData(values=values))
        .mark_point(filled=True, size=80)
        .encode(
            alt.X("multiple:Q", title="step time / step without communication", scale=alt.Scale(type="log")),
            alt.Y("method:N", title=None, sort=None),
            alt.Color("link:N", scale=links, title="link"),
            alt.Shape("link:N", scale=links, title="link"),
        )
        .properties(width=420)
    )
    points.facet(row=alt.Row("field:N", title=None)).resolve_scale(y="independent").save(str(path), scale_factor=2)
