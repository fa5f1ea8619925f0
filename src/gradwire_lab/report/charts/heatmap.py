"""Speed-ups over links and workers: a small map for each model, gray where nothing is gained."""

from collections.abc import Sequence

import altair as alt

from gradwire_lab.report.charts.figure import Chart, Figure, Row, chart, finish, tooltips
from gradwire_lab.report.numbers import ratio
from gradwire_lab.report.slug import slug

# Slower, even, and ever faster: distinct in lightness too.
_STEPS = (0.98, 1.02, 1.2, 2, 5, 20, 100)
_SHADES = ("#D55E00", "#C9CDD2", "#D6E8F5", "#A6CFEA", "#6BAFDB", "#2A79B2", "#1465A0", "#08406E")
_DARK = 5  # from this speed-up on, figures are white
_ROW_HEIGHT = 34
_TIPS = {
    "choice:N": "auto takes",
    "seconds:Q .3g": "seconds a step",
    "ddp_bf16_seconds:Q .3g": "bfloat16 DDP",
    "exposed:Q .0%": "of that, waiting for the network",
    "fastest_compressed:N": "fastest that compresses",
    "fastest_compressed_seconds:Q .3g": "its seconds",
    "gossip_seconds:Q .3g": "gossip on a ring",
}


def speedups(rows: Sequence[Row], links: Sequence[str]) -> Figure:
    """One model with one batch: rows of a simulation that differ in workers and link only."""
    first = rows[0]
    name = f"{first['model']}, {first['batch']}"
    lost = sum(bool(row["compression_loses"]) for row in rows)
    caption = (
        f"{first['parameters'] / 1e6:,.0f} M parameters, {1e3 * first['compute_seconds']:.3g} ms of computing a step. "
        f"Numbers: times faster than bfloat16 DDP. In {lost} of {len(rows)} cells no compression beats dense DDP."
    )
    return Figure(slug(name), name, caption, _chart(rows, links))


def _chart(rows: Sequence[Row], links: Sequence[str]) -> Chart:
    shown = [{**row, "shown": _shown(row), "white": row["speedup"] >= _DARK} for row in rows]
    sizes = sorted({row["workers"] for row in rows})
    base = chart(shown).encode(
        alt.X(
            "link:N", sort=list(links), title="link", axis=alt.Axis(labelAngle=0, labelExpr="split(datum.label, ',')")
        ),
        alt.Y("workers:O", sort=sizes, title="workers"),
    )
    scale = alt.Scale(type="threshold", domain=list(_STEPS), range=list(_SHADES))
    cells = base.mark_rect(stroke="white", strokeWidth=1).encode(
        color=alt.Color("speedup:Q", scale=scale, legend=None),  # the figures are in the cells
        tooltip=tooltips(_TIPS),
    )
    words = base.mark_text(fontSize=11).encode(
        text="shown:N", color=alt.condition("datum.white", alt.value("white"), alt.value("#1c1e21"))
    )
    return finish(alt.layer(cells, words), _ROW_HEIGHT * len(sizes))


def _shown(row: Row) -> str:
    return "dense" if row["compression_loses"] else ratio(row["speedup"])
