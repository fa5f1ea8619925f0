"""Draw docs/headline-sgd.svg and docs/headline-adamw.svg: what each spec loses, and how much smaller its messages are.

    python docs/results/headlines.py

It reads the rows of docs/results-tables.md and of adamw-h200.jsonl, local-h200.jsonl and warm-up-h200.jsonl beside this
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
SHORT = {  # runs of local steps with a warm-up of 75 steps, and what the figure calls them
    "center": "sparseloco(H=5, start=225)",
    "H 15": "sparseloco(H=15, start=225)",
}
LONG = {  # the same of longer warm-ups: name, rate, warm-up
    ("keep", 0.002, 450): "sparseloco(H=1, keep=1.0, start=55)",
    ("keep, no start", 0.002, 450): "sparseloco(H=1, keep=1.0)",
    ("H 5, rate 0.7", 0.0028, 450): "sparseloco(H=5, rate=0.7, start=225)",
    ("onebit", 0.002, 225): "onebit_adam(start=225)",
}
BEST = 0.003, 225  # rate and warm-up of dense training
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


def read(name: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (DOCS / "results" / name).read_text().splitlines()]
    return [line for line in lines if line["lr"] == 0.002 and "note" not in line]


def adamw() -> list[dict[str, object]]:
    lines = read("adamw-h200.jsonl")
    same = [line for line in read("local-h200.jsonl") if line["spec"] == "dense" or line["name"] == "int4"]
    # Dense runs of the same script come last, so that they are what its runs are compared with.
    lines = [{**line, "spec": line["name"], "payload_ratio": line["payload_ratio_all_in"]} for line in same] + lines
    dense = {(line["seed"], line["compiled"]): line["test_loss"] for line in lines if line["spec"] == "dense"}
    specs = dict.fromkeys(line["spec"] for line in lines if line["spec"] != "dense")
    return [_lost(spec, [line for line in lines if line["spec"] == spec], dense, "payload_ratio") for spec in specs]


def local() -> list[dict[str, object]]:
    lines = read("local-h200.jsonl")
    dense = {(line["seed"], line["compiled"]): line["test_loss"] for line in lines if line["spec"] == "dense"}
    runs = {title: [line for line in lines if line["name"] == name] for name, title in SHORT.items()}
    return [_lost(title, found, dense, "payload_ratio_all_in") for title, found in runs.items()]


def long() -> list[dict[str, object]]:
    """Runs with a long warm-up, against dense training at its best."""
    lines = [json.loads(line) for line in (DOCS / "results" / "warm-up-h200.jsonl").read_text().splitlines()]
    lines = [
        line | {"payload_ratio_all_in": line.get("payload_ratio_all_in") or line["payload_ratio"]} for line in lines
    ]
    small = [line for line in lines if line["parameters"] < 2e7 and line.get("inner", "adamw") == "adamw"]
    best = [line for line in small if (line["spec"], line["lr"], line["warm_up"]) == ("dense", *BEST)]
    dense = {(line["seed"], line["compiled"]): line["test_loss"] for line in best}
    rows = []
    for (name, rate, warm_up), title in LONG.items():
        wanted = {"keep": {"keep", "keep, 2e-3"}}.get(name, {name})
        found = [line for line in small if line["name"] in wanted and (line["lr"], line["warm_up"]) == (rate, warm_up)]
        rows.append(_lost(f"{title}, long warm-up", found, dense, "payload_ratio_all_in"))
    return rows


def _lost(spec: str, runs: list[dict[str, Any]], dense: dict[Any, float], ratio: str) -> dict[str, object]:
    """A row of the figure: percent of loss above dense runs of the same seeds."""
    lost = [100 * (run["test_loss"] / dense[run["seed"], run["compiled"]] - 1) for run in runs]
    half = t.ppf(0.975, len(lost) - 1) * stdev(lost) / len(lost) ** 0.5 if len(lost) > 2 else 0.0
    mean, name = sum(lost) / len(lost), f"{spec}: {len(lost)} seed{'s' * (len(lost) > 1)}"
    return {"spec": name, "ratio": runs[0][ratio], "mean": mean, "low": mean - half, "high": mean + half}


def figure(rows: list[dict[str, object]], title: str, caption: list[str], axis: str) -> altair.LayerChart:
    rows = sorted(rows, key=lambda row: row["ratio"])
    named = [row | {"name": f"{row['spec']}, {row['ratio']:,.0f}x smaller"} for row in rows]
    chart = altair.Chart(altair.Data(values=named)).encode(
        altair.Y("name:N", sort=None, title=None).axis(labelLimit=400, labelFontSize=12, grid=True)
    )
    color = altair.value("#1f5fbf")
    bars = chart.mark_rule(strokeWidth=3).encode(altair.X("low:Q", title=axis), altair.X2("high:Q"), color=color)
    points = chart.mark_point(filled=True, size=80, opacity=1).encode(altair.X("mean:Q"), color=color)
    numbers = chart.mark_text(dy=-11, fontSize=11).encode(altair.X("mean:Q"), altair.Text("mean:Q", format="+.2f"))
    level = altair.Chart(altair.Data(values=[{"mean": 0}])).mark_rule(strokeDash=[4, 3]).encode(altair.X("mean:Q"))
    return (level + bars + points + numbers).properties(
        width=440,
        height=40 * len(rows),
        background="white",
        padding={"left": 70, "top": 8, "right": 12, "bottom": 8},  # readers' fonts are wider than the one measured here
        title=altair.Title(title, subtitle=caption, anchor="start"),
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
    second = figure(
        adamw() + local() + long(),
        f"A GPT of 10.9 M parameters, AdamW: messages {headline(long())} %",
        [
            "Test loss on WikiText-2 against dense, 8 workers, 1,500 steps; 95 % intervals. Starts are counted.",
            "A long warm-up is compared with dense at its best, the others with dense of the same short warm-up.",
        ],
        "test loss above dense, percent; left is better",
    )
    for name, chart in (("sgd", first), ("adamw", second)):
        (DOCS / f"headline-{name}.svg").write_text(vl_convert.vegalite_to_svg(chart.to_dict()))


if __name__ == "__main__":
    main()
