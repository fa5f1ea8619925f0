"""Run folders without a training: the files that one would leave, with numbers made up by a formula."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PARAMETERS = 76_410
STEPS = 20  # in an epoch
SPECS = {  # what is sent, and what it costs in accuracy
    "fp32": (1.0, 0.0),
    "topk(0.01) | sign": (1 / 180, 0.6),
    "dgc(0.001)": (1 / 430, 1.1),
    "qsgd(4)": (1 / 7.9, 0.1),
    "terngrad": (1 / 15.6, 1.9),
}


def write_run(
    root: Path,
    spec: str = "fp32",
    seed: int = 0,
    epochs: int = 6,
    values: Sequence[float] | None = None,
    ended: bool = True,
    metric: str = "top1",
    consensus: bool = False,
    world: int = 4,
    settings: dict[str, Any] | None = None,
    name: str | None = None,
    more: dict[str, Any] | None = None,
) -> Path:
    """Write one run folder and return it. ``values`` are the metric after each epoch, as the log holds them.

    ``more`` is what else each epoch notes.
    """
    stem = name or "digits-" + "".join(c if c.isalnum() or c == "." else "-" for c in spec).strip("-")
    folder = root / f"{stem}-{seed}"
    folder.mkdir(parents=True)
    share, cost = SPECS.get(spec, (0.1, 0.5))
    lines: list[dict[str, Any]] = [
        {"event": "start", "recipe": "digits", "spec": spec, "world": world, "parameters": PARAMETERS}
    ]
    record: dict[str, Any] = {}
    for epoch in range(1, epochs + 1):
        for step in range((epoch - 1) * STEPS + 1, epoch * STEPS + 1):
            lines.append(_step(step, share, seed))
        value = values[epoch - 1] if values else _value(epoch, cost, seed, metric)
        record = _epoch(epoch, value, share, seed, metric, world) | (more or {})
        if consensus:
            record["consensus"] = 0.5 * math.exp(-epoch / 2) * (1 + 0.1 * seed)
        lines.append({"event": "epoch", **record})
    if ended:
        dense = 4 * PARAMETERS * epochs * STEPS
        rules = {"*": [round(0.9 * dense * share), round(0.99 * dense)], "dim<=1": [dense // 200, dense // 100]}
        layers = {f"conv{i}.weight": round(4 * share * 9 * 16**2 * (i + 1)) for i in range(6)} | {"fc.bias": 20}
        lines.append({"event": "final", **record, "best": record["value"], "rules": rules, "layers": layers})
    (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "recipe.toml").write_text(_recipe(spec, seed, epochs, settings or {}))
    environment = {"command": ["gradwire", "train", "digits", "--suffix", spec], "torch": "2.13.0", "revision": "abc"}
    (folder / "environment.json").write_text(json.dumps(environment))
    return folder


def write_grid(root: Path, seeds: int = 3, **more: Any) -> list[Path]:
    return [write_run(root, spec, seed, **more) for spec in SPECS for seed in range(seeds)]


def _step(step: int, share: float, seed: int) -> dict[str, Any]:
    loss = 2.3 * math.exp(-step / 30) + 0.1 + 0.05 * math.sin(7 * step + seed)
    return {
        "event": "step",
        "step": step,
        "epoch": step / STEPS,
        "loss": loss,
        "lr": 0.05,
        "sent": round(6 * PARAMETERS * share * step),
        "seconds": 0.004 * step,
    }


def _value(epoch: int, cost: float, seed: int, metric: str) -> float:
    wobble = 0.3 * math.sin(12.9898 * (seed + 1) + 78.233 * cost)
    if metric == "perplexity":
        return 80 + cost + wobble + 800 * math.exp(-epoch)
    return (97.5 - cost + wobble - 60 * math.exp(-epoch)) / 100


def _epoch(epoch: int, value: float, share: float, seed: int, metric: str, world: int) -> dict[str, Any]:
    step, dense = epoch * STEPS, 4 * PARAMETERS * epoch * STEPS
    payload = round(dense * share)
    sent = round(2 * (world - 1) / world * payload) + 100 * step
    return {
        "epoch": epoch,
        "step": step,
        "train_loss": 0.1 + math.exp(-epoch),
        "test_loss": 0.2 + math.exp(-epoch),
        "metric": metric,
        "value": value,
        "sent": sent,
        "received": sent,
        "payload": payload,
        "dense": dense,
        "payload_ratio": dense / payload,
        "wire_ratio": 2 * (world - 1) / world * dense / sent,
        "encode_seconds": 0.0004 * step * (share < 1),
        "wire_seconds": 0.0015 * step * (0.4 + 0.6 * share),
        "decode_seconds": 0.0003 * step * (share < 1),
        "seconds": 0.004 * step * (1 + 0.02 * seed) * (0.9 + 0.1 * share),
    }


def _recipe(spec: str, seed: int, epochs: int, settings: dict[str, Any]) -> str:
    tables: dict[str, dict[str, Any]] = {
        "data": {"name": "digits"},
        "model": {"name": "cnn"},
        "train": {"epochs": epochs, "seed": seed},
        "sync": {"spec": spec, "granularity": "layer"},
    }
    for key, value in settings.items():
        table, _, word = key.partition(".")
        tables[table][word] = value
    return "\n".join(
        f"[{name}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())
        for name, table in tables.items()
    )
