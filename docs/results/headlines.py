"""Draw docs/headline-sgd.svg and docs/headline-adamw.svg: what each spec loses, and how much smaller its messages are.

It also draws docs/loss-bits.svg: test loss against the bits that all workers encode for a token.

    python docs/results/headlines.py

It reads the rows of docs/results-tables.md, and of adamw-h200.jsonl, warm-up-h200.jsonl and muon-h200.jsonl beside this
file, and needs gradwire[report].
"""

import json
import re
from pathlib import Path
from statistics import stdev
from typing import Any

import altair
import vl_convert
from scipy.stats import t

DOCS = Path(__file__).parent.parent
BEST = 0.004, 450  # rate and warm-up of dense training
DENSE = 85_287  # bits of float32 gradients that eight workers encode for each token of their batch
TUNED = {  # runs of AdamW, each at the best rate and warm-up that were tried, and what the figure calls them
    ("int4", *BEST): "int4",
    ("zero one", *BEST): "zero_one_adam(start=215)",
    ("onebit, two bits first", *BEST): "onebit_adam(start=450)",
    ("keep", 0.002, 450): "sparseloco(H=1, keep=1.0, start=55)",
    ("keep, no start", 0.002, 450): "sparseloco(H=1, keep=1.0)",
    ("H 5, rate 0.7", *BEST): "sparseloco(H=5, rate=0.7, start=225)",
}
MUON = {  # the same with Muon inside, against dense training with Muon
    ("Muon, keep", 0.003, 450): "Muon, sparseloco(H=1, keep=1.0)",
    ("Muon, schedule from 1,100", 0.003, 450): "Muon, sparseloco(H=1), then H=5",
}
SHORT = {  # compiled runs of one seed at a rate of 0.002 and a warm-up of 75 steps: no other was tried for dgc_adam
    "dense": "dense AdamW, short warm-up",
    "dgc 0.1 unmasked": "dgc_adam(0.1, start=225)",
    "dgc 0.01, 225": "dgc_adam(0.01, start=225)",
    "dgc 0.001, 225": "dgc_adam(0.001, start=225)",
}
WANTED = {  # rows of ResNet-9, and what the figure calls them
    "dgc(0.0042, values=sign), batch 256, granularity model, lr 0.2": "dgc(0.0042, values=sign)",
    "dgc(0.0022, values=sign), granularity model": "dgc(0.0022, values=sign)",
    "dgc(0.0008, values=sign), granularity model": "dgc(0.0008, values=sign)",
    "topk(0.0037)|sign": "topk(0.0037) | sign",
    "qsgd(levels=255, bucket=None), granularity layer": "qsgd, no feedback",
    "terngrad(clip=2.5), granularity layer": "terngrad, no feedback",
}


def sgd() -> list[dict[str, object]]:
    rows = []
    for line in (DOCS / "results-tables.md").read_text().splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if cells and cells[0] in WANTED:
            mean, *interval = [float(number) for number in re.findall(r"[-+][\d.]+", cells[5])]
            low, high = interval or (mean, mean)
            ratio = float(cells[6].rstrip("x").replace(",", ""))
            name = f"{WANTED[cells[0]]}: {cells[2]} seed{'s' * (cells[2] != '1')}"
            rows.append({"spec": name, "ratio": ratio, "mean": mean, "low": low, "high": high})
    assert len(rows) == len(WANTED)
    return rows


def adaptive() -> list[dict[str, object]]:
    """Runs against dense training with the same optimizer, both as well as they were tuned."""
    files = [DOCS / "results" / name for name in ("warm-up-h200.jsonl", "muon-h200.jsonl")]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    usual = {"text": "wikitext-2", "final": 0.1}
    small = [line for line in lines if line["parameters"] < 2e7 and all(line.get(k, v) == v for k, v in usual.items())]
    rows: list[dict[str, object]] = []
    for inner, tuned in (("adamw", TUNED), ("muon", MUON)):
        own = [line for line in small if line.get("inner", "adamw") == inner]
        best = [line for line in own if (line["spec"], line["lr"], line["warm_up"]) == ("dense", *BEST)]
        dense = {line["seed"]: line["test_loss"] for line in best}
        optimizer, mean = {"adamw": "AdamW", "muon": "Muon"}[inner], sum(dense.values()) / len(dense)
        rows.append({"spec": f"dense {optimizer}", "optimizer": optimizer, "ratio": 1.0, "loss": mean})
        for (name, rate, warm_up), title in tuned.items():
            wanted = {"keep": {"keep", "keep, 2e-3"}}.get(name, {name})
            found = [
                line for line in own if line["name"] in wanted and (line["lr"], line["warm_up"]) == (rate, warm_up)
            ]
            runs = [line for line in found if line.get("start") in (None, 0, 55, 225)]
            loss = sum(line["test_loss"] for line in runs) / len(runs)
            rows.append(_lost(title, runs, dense) | {"optimizer": optimizer, "loss": loss})
    return rows


def short_warm_up() -> list[dict[str, object]]:
    """Runs with a short warm-up."""
    files = [DOCS / "results" / name for name in ("adamw-h200.jsonl", "muon-h200.jsonl")]
    lines = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    short = {"lr": 0.002, "warm_up": None, "compiled": True}
    runs = [run for run in lines if run["name"] in SHORT and all(run.get(k) == v for k, v in short.items())]
    assert len(runs) == len(SHORT)
    return [
        {"spec": SHORT[run["name"]], "optimizer": "AdamW", "ratio": run["payload_ratio"], "loss": run["test_loss"]}
        for run in runs
    ]


def _lost(spec: str, runs: list[dict[str, Any]], dense: dict[int, float]) -> dict[str, object]:
    """A row of the figure: percent of loss above dense runs of the same seeds."""
    lost = [100 * (run["test_loss"] / dense[run["seed"]] - 1) for run in runs]
    half = t.ppf(0.975, len(lost) - 1) * stdev(lost) / len(lost) ** 0.5 if len(lost) > 2 else 0.0
    mean, name = sum(lost) / len(lost), f"{spec}: {len(lost)} seed{'s' * (len(lost) > 1)}"
    ratio = runs[0].get("payload_ratio_all_in") or runs[0]["payload_ratio"]
    return {"spec": name, "ratio": ratio, "mean": mean, "low": mean - half, "high": mean + half}


def figure(rows: list[dict[str, object]], title: str, caption: list[str], axis: str) -> altair.LayerChart:
    rows = sorted(rows, key=lambda row: row["ratio"])
    named = [row | {"name": f"{row['spec']}, {row['ratio']:,.0f}x smaller"} for row in rows]
    chart = altair.Chart(altair.Data(values=named)).encode(
        altair.Y("name:N", sort=None, title=None).axis(labelLimit=400, labelFontSize=12, grid=True)
    )
    color = altair.value("#1f5fbf")
    bars = chart.mark_rule(strokeWidth=3).encode(
        altair.X("low:Q", title=axis).axis(labelFlush=False), altair.X2("high:Q"), color=color
    )
    points = chart.mark_point(filled=True, size=80, opacity=1).encode(altair.X("mean:Q"), color=color)
    written = chart.encode(altair.X("mean:Q"), altair.Text("mean:Q", format="+.2f"))
    halo = written.mark_text(dy=-11, fontSize=11, stroke="white", strokeWidth=5)  # the line at 0 crosses no number
    numbers = halo + written.mark_text(dy=-11, fontSize=11)
    level = altair.Chart(altair.Data(values=[{"mean": 0}])).mark_rule(strokeDash=[4, 3]).encode(altair.X("mean:Q"))
    return (level + bars + points + numbers).properties(
        width=440,
        height=40 * len(rows),
        background="white",
        padding={"left": 70, "top": 8, "right": 12, "bottom": 8},  # readers' fonts are wider than the one measured here
        title=altair.Title(title, subtitle=caption, anchor="start"),
    )


def loss_against_bits(rows: list[dict[str, Any]], short: list[dict[str, Any]]) -> altair.LayerChart:
    """Points of a mean over seeds each, and hollow ones with a short warm-up; the names of specs stand beside them."""
    values = [
        row | {"bits": DENSE / row["ratio"], "name": row["spec"].removeprefix("Muon, "), "short": row in short}
        for row in (*rows, *short)
    ]
    chart = altair.Chart(altair.Data(values=values)).encode(
        altair.X("bits:Q", title="bits that all workers encode for a token, start included")
        .scale(type="log", domain=[150, 1_000_000])
        .axis(values=[300, 1_000, 3_000, 10_000, 30_000, 100_000], format=",d"),
        altair.Y("loss:Q", title="test loss, nats a byte").scale(domain=[0.985, 1.12]),
        altair.Color("optimizer:N", title=None).scale(range=["#1f5fbf", "#c0561f"]),
    )
    points = [
        chart.transform_filter(f"datum.short == {str(hollow).lower()}").mark_point(
            filled=not hollow, size=80, opacity=1
        )
        for hollow in (False, True)
    ]
    texts = [  # one that would lie on another stands below its point
        chart.transform_filter(f"{'' if below else '!'}test(/start=55/, datum.spec)")
        .mark_text(align="left", dx=7, dy=12 if below else -3, fontSize=11)
        .encode(altair.Text("name:N"))
        for below in (False, True)
    ]
    return altair.layer(*points, *texts).properties(
        width=620,
        height=480,
        background="white",
        padding={"left": 8, "top": 8, "right": 12, "bottom": 8},
        title=altair.Title(
            "A GPT of 10.9 M parameters: loss against bits per token",
            subtitle=[
                "WikiText-2 as bytes, 8 workers, 1,500 steps; means over the seeds of the figure above.",
                "Hollow: one seed, with a warm-up of 75 steps and a rate of 0.002 for dense and dgc_adam.",
            ],
            anchor="start",
        ),
    )


def headline(rows: list[dict[str, object]]) -> str:
    """The smallest messages whose loss has an interval."""
    best = max((row for row in rows if row["low"] < row["high"]), key=lambda row: row["ratio"])
    return "{ratio:.0f} times smaller, {mean:+.2f} [{low:+.2f}, {high:+.2f}]".format(**best)


def main() -> None:
    first = figure(
        sgd(),
        f"ResNet-9 on CIFAR-10, SGD: messages {headline(sgd())} points",
        ["Test accuracy against dense training, 8 workers. Bars are 95 % intervals over pairs of seeds."],
        "points of accuracy against dense; right is better",
    )
    rows = adaptive()
    compressed = [row for row in rows if row["ratio"] != 1.0]
    second = figure(
        compressed,
        f"A GPT of 10.9 M parameters, AdamW or Muon: messages {headline(compressed)} %",
        [
            "Test loss on WikiText-2 against dense with the same optimizer, 8 workers, 1,500 steps; 95 % intervals.",
            "Starts are counted. Dense and each spec have the best rate and warm-up that were tried for it.",
        ],
        "test loss above dense, percent; left is better",
    )
    third = loss_against_bits(rows, short_warm_up())
    for name, chart in (("headline-sgd", first), ("headline-adamw", second), ("loss-bits", third)):
        (DOCS / f"{name}.svg").write_text(vl_convert.vegalite_to_svg(chart.to_dict()))


if __name__ == "__main__":
    main()
