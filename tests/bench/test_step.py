"""`bench step` compares methods round by round, and says who refused; `bench memory` weighs them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gradwire_lab.bench import memory, roofline, step
from gradwire_lab.cli.main import bench as app
from spawn import run_ranks


def news(method: str, number: int, seconds: float, rank: int = 0) -> dict[str, object]:
    return {"method": method, "round": number, "seconds": seconds, "busy": seconds / 2, "rank": rank}


def test_ratios_are_of_neighbors_in_time() -> None:
    """The machine slows down tenfold in the second round; no ratio shows it."""
    heard = [
        {"method": method, "params": 1000, "kept": kept, "peak": kept + 400}
        for method, kept in ((step.DENSE, 8000), (step.NO_COMM, 8000), ("topk(0.01)", 12000))
    ]
    heard.append({"method": "ddp-bf16", "refused": "TypeError: not on gloo"})
    for number, slow in ((0, 1.0), (1, 10.0), (2, 1.0)):
        for rank in (0, 1):
            heard.append(news(step.DENSE, number, 0.1 * slow, rank))
            heard.append(news(step.NO_COMM, number, 0.08 * slow, rank))
            heard.append(news("topk(0.01)", number, 0.11 * slow, rank))
    rows = {row["method"]: row for row in step._rows(heard, (step.DENSE, step.NO_COMM, "topk(0.01)", "ddp-bf16"))}
    ours = rows["topk(0.01)"]
    assert ours["to_dense"] == pytest.approx(1.1)
    assert ours["to_dense_quartiles"] == pytest.approx([1.1, 1.1])
    assert ours["to_silent"] == pytest.approx(0.11 / 0.08)
    assert ours["step_ms"] == pytest.approx(110)
    assert ours["busy_ms"] == pytest.approx(55)
    assert ours["kept_floats"] == pytest.approx(1.0)
    assert ours["peak_floats"] == pytest.approx(1.0)
    assert rows["ddp-bf16"]["refused"].startswith("TypeError")


def test_two_ranks_train_side_by_side() -> None:
    flags = ["--workload", "resnet20", "--batch", "2", "--rounds", "2", "--steps", "1"]
    methods = ["--method", "topk(0.01)", "--method", "ddp-bf16"]
    done = CliRunner().invoke(app, ["step", *flags, *methods, "--json"])
    assert done.exit_code == 0, done.output
    rows = {row["method"]: row for line in done.stdout.splitlines() if (row := json.loads(line))}
    assert set(rows) == {"ddp-none", "ddp-fp32", "topk(0.01)", "ddp-bf16"}
    assert rows["ddp-fp32"]["to_dense"] == 1.0
    assert rows["topk(0.01)"]["step_ms"] > 0
    assert rows["topk(0.01)"]["params"] == 269_722
    assert "refused" in rows["ddp-bf16"]  # torch has no such hook on gloo
    progress = [line for line in done.stderr.splitlines() if "round" in line]
    assert len(progress) == 2 * 3 and not progress[-1].endswith("left")
    assert all(re.search(r"^resnet20, .*; about \d+:\d\d:\d\d left$", line) for line in progress[:-1])


def test_methods_of_adamw_are_past_their_start() -> None:
    flags = ["--workload", "resnet20", "--workers", "1", "--batch", "2", "--rounds", "1", "--steps", "1"]
    methods = ["--method", "onebit_adam(start=2)", "--method", "dgc_adam(start=5)"]
    done = CliRunner().invoke(app, ["step", *flags, *methods, "--optimizer", "adamw", "--warm", "3", "--json"])
    assert done.exit_code == 0, done.output
    rows = {row["method"]: row for line in done.stdout.splitlines() if (row := json.loads(line))}
    assert rows["onebit_adam(start=2)"]["optimizer"] == "adamw"
    assert all(rows[name]["step_ms"] > 0 for name in ("ddp-fp32", "onebit_adam(start=2)", "dgc_adam(start=5)"))


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ValueError, match="no optimizer 'adam'"):
        step.measure(step.StepBench("resnet20", "cpu", optimizer="adam"), 2)
    with pytest.raises(ValueError, match="no workload 'resnet21'"):
        step.measure(step.StepBench("resnet21", "cpu"), 2)
    with pytest.raises(ValueError, match="compared with ddp-fp32"):
        step.measure(step.StepBench("resnet20", "cpu", ("topk(0.01)",)), 2)


def weighed(rank: int, world: int, spec: str, size: int) -> dict[str, Any]:
    return memory.weigh(spec, torch.device("cpu"), size)


def test_memories_are_seen() -> None:
    """Momentum correction keeps two floats per parameter at least, a cast without feedback next to none."""
    size = 3_000_000
    (light,) = memory.measure(["fp16; feedback=none"], "cpu", size)
    # The others in ranks, which start faster than the processes that `measure` starts.
    (heavy,), (rounds,) = (run_ranks(weighed, 1, spec, size) for spec in ("dgc(0.001)", "local:diloco(H=1)"))
    assert heavy["params"] == pytest.approx(size, rel=0.01)
    assert 1.9 < heavy["kept_floats"] < 5
    assert heavy["peak_floats"] >= heavy["kept_floats"] - 0.1
    assert light["kept_floats"] < heavy["kept_floats"] - 1
    # Outer weights and momentum, and in a round a difference.
    assert 1.9 < rounds["kept_floats"] < 7 and rounds["peak_floats"] > rounds["kept_floats"] + 0.9


def test_a_roofline_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("vl_convert")
    rows = [
        {"kernel": name, "device": "cpu", "n": 1000, "segments": 1, "bytes_per_element": each}
        | {"ms": 1.0, "floor_ms": 0.8, "to_floor": 1.25, "reference_ms": 9.0}
        for name, each in (("dgc", 20.0), ("sign_encode", 4.125), ("topk", 4.0))
    ]
    for name in ("roof.svg", "roof.png"):
        roofline.picture(rows, tmp_path / name)
        assert (tmp_path / name).stat().st_size > 1000
    assert "sign_encode" in (tmp_path / "roof.svg").read_text()
