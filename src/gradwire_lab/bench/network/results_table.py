"""Results table: what rows say together: multiples of the silent step, speed-ups, bytes, and a picture of them."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from gradwire_lab.bench.network.grid import Row, key_of
from gradwire_lab.bench.network.methods import DENSE

COLUMNS = ("model", "link", "ranks", "method", "ms", "x silent", "x dense", "sent/step", "NIC/step", "NIC/framed")


def results(rows: Sequence[Row]) -> list[Row]:
    """Every row, compared with the others. Multiples compare within one run, at one load.

    What is added to a row, None where it is not known:
        multiple: Of the step that does not communicate, in the same run.
        speedup: Over the better of torch's dense ways in the same field.
        honest: NIC bytes over reported bytes after the framing model.
    """
    return [row | _compared(row, rows) for row in rows]


def _compared(row: Row, rows: Iterable[Row]) -> dict[str, float | None]:
    if "failed" in row:
        return {"multiple": None, "speedup": None, "honest": None}
    multiple = row["step_ms"] / row["silent_ms"]
    dense = [
        other["step_ms"] / other["silent_ms"]
        for other in rows
        if key_of(other)[:-1] == key_of(row)[:-1] and other["method"] in DENSE and "failed" not in other
    ]
    honest = row["nic"] / row["framed"] if row["nic"] and row["framed"] else None
    return {"multiple": multiple, "speedup": min(dense) / multiple if dense else None, "honest": honest}


def row_cells(row: Row) -> tuple[str, ...]:
    """The cells of a table's row."""
    start = (row["model"], row["link"], str(row["world"]), row["method"])
    if "failed" in row:
        return (*start, row["failed"].partition(":")[0], "", "", "", "", "")
    return (
        *start,
        f"{row['step_ms']:.1f}",
        f"{row['multiple']:.2f}",
        "" if row["speedup"] is None else f"{row['speedup']:.2f}",
        _bytes(row["reported"]),
        _bytes(row["nic"]),
        "" if row["honest"] is None else f"{row['honest']:.3f}",
    )


def markdown(found: Sequence[Row]) -> str:
    """The table for a page."""
    rows = [
        COLUMNS,
        tuple("--:" if i in (2, *range(4, 10)) else "---" for i in range(len(COLUMNS))),
        *map(row_cells, found),
    ]
    return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |" for row in rows)


def _bytes(n: float | None) -> str:
    if n is None:
        return ""
    return f"{n / 1e6:.2f} MB" if n >= 1e6 else f"{n / 1e3:.1f} kB"


def picture(found: Sequence[Row], path: Path) -> None:
    """Multiples of the silent step by link and method, as PNG or SVG by the file's name."""
    import altair as alt

    shown = [{name: row[name] for name in row if name != "pace"} for row in found if "failed" not in row]
    values = [{"field": f"{row['model']}, {row['world']} ranks", **row} for row in shown]
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
