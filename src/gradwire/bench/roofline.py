"""Roofline: every kernel's time over the bytes it cannot avoid, and the line of a copy of as many bytes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


def picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Rows of `bench kernels`, as PNG or SVG by the file's name."""
    import altair as alt

    points = [_point(row) for row in rows]
    floor = sorted(
        ({"bytes": point["bytes"], "ms": row["floor_ms"]} for point, row in zip(points, rows, strict=True)),
        key=lambda point: point["bytes"],
    )
    x = alt.X("bytes:Q", title="bytes that must be read and written", scale=alt.Scale(type="log"), axis=_bytes(alt))
    y = alt.Y("ms:Q", title="milliseconds", scale=alt.Scale(type="log"))
    line = alt.Chart(alt.InlineData(values=floor)).mark_line(color="#7F7F7F", strokeDash=[4, 3]).encode(x, y)
    base = alt.Chart(alt.InlineData(values=points)).encode(x, y)
    dots = base.mark_point(filled=True, size=70, opacity=0.9).encode(
        alt.Color("kind:N", title=None, scale=alt.Scale(range=["#0072B2", "#D55E00", "#009E73", "#CC79A7"])),
        alt.Shape("kind:N", title=None),
    )
    names = base.mark_text(align="left", dx=8, fontSize=9).encode(alt.Text("kernel:N"))
    title = {"text": "Kernels against a copy of as many bytes", "subtitle": "dashed: the copy, in the same run"}
    drawn = alt.layer(line, dots, names).properties(width=640, height=420, title=title)
    drawn.save(str(path), scale_factor=2)


def _bytes(alt: Any) -> Any:
    return alt.Axis(format="~s", labelExpr="datum.label ? datum.label + 'B' : ''", tickCount=6)


def _point(row: dict[str, Any]) -> dict[str, Any]:
    name = str(row["kernel"])
    kinds = {"encode": "encode", "decode": "decode"}
    kind = kinds.get(name.rpartition("_")[2], "with feedback" if "feedback" in name or name == "dgc" else "choose, add")
    return {"kernel": name, "kind": kind, "bytes": row["bytes_per_element"] * row["n"], "ms": row["ms"]}
