"""Roofline: every kernel's time beside that of a copy of the bytes it cannot avoid, and of its definition in torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

SERIES = ("copy of as many bytes", "kernel", "plain torch")
LETTER = 6.4  # pixels of a letter of a name, in the wide fonts that some readers have


def picture(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Rows of `bench kernels`, as PNG or SVG by the file's name; kernels nearest to memory's speed first."""
    import altair as alt

    ordered = sorted(rows, key=lambda row: row["to_floor"])
    names = [_name(row) for row in ordered]
    values = [
        {"kernel": name, "what": what, "ms": ms, "low": row["floor_ms"], "high": row["ms"]}
        for name, row in zip(names, ordered, strict=True)
        for what, ms in zip(SERIES, (row["floor_ms"], row["ms"], row["reference_ms"]), strict=True)
    ]
    base = alt.Chart(alt.InlineData(values=values))
    room = LETTER * max(map(len, names))
    y = alt.Y("kernel:N", sort=names, title=None, axis=alt.Axis(grid=True, labelLimit=room, minExtent=room))
    x = alt.X("ms:Q", title="milliseconds", scale=alt.Scale(type="log"))
    above = base.mark_rule(color="#B0B0B0", strokeWidth=3).encode(y, alt.X("low:Q"), alt.X2("high:Q"))
    color = alt.Color("what:N", sort=SERIES, title=None, scale=alt.Scale(range=["#7F7F7F", "#0072B2", "#E69F00"]))
    dots = base.mark_point(filled=True, size=70, opacity=1).encode(x, y, color)
    drawn = alt.layer(above, dots).properties(width=520, height=alt.Step(17), title=_title(ordered))
    drawn.configure_legend(orient="bottom", columnPadding=40).save(str(path), scale_factor=2)


def _name(row: dict[str, Any]) -> str:
    each = f"{row['bytes_per_element']:.3g} B"
    sizes = f"{row['n'] / 1e6:.3g} M" + (f" / {row['segments']}" if row["segments"] > 1 else "")
    return f"{row['kernel']}, {each} x {sizes}"


def _title(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    devices = ", ".join(sorted({row["device"] for row in rows}))
    return {"text": f"Kernels against memory, {devices}", "subtitle": "gray: a copy that moves as many bytes, same run"}
