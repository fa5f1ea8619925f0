"""Local steps as `gradwire advise` tells of them, and models of a user's own that it is asked about."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from gradwire.comm.rates import LinkSpec
from gradwire_lab.bench.network import calibrate, calibration_cache
from gradwire_lab.cli.advice_text import start_text, why_local
from gradwire_lab.cli.main import app
from gradwire_lab.perf_model.advice import advise
from gradwire_lab.perf_model.calibration import Calibration, CodingCost, save
from gradwire_lab.perf_model.candidates import SPARSE
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import predict
from gradwire_lab.perf_model.local_steps import local_choices, local_steps
from gradwire_lab.perf_model.model import ModelProfile
from gradwire_lab.report.numbers import in_seconds

FIGURES = Calibration(
    ModelProfile({"embed": (10_000, 650), "bias": (2600,), "head": (10_000, 650)}),
    0.1,
    0.2,
    {
        "ddp-fp32": CodingCost(0.0, 0.0),
        "int8": CodingCost(0.03, 0.03),
        "int4": CodingCost(0.03, 0.03),
        SPARSE: CodingCost(0.06, 0.03),
    },
    world=4,
    note="by hand",
)
THIN, FAST = (Cluster(4, LinkSpec.parse(link)) for link in ("1mbit,20ms", "100gbit,10us"))
ROWS = """
import torch
from torch import nn

def make(classes, size):
    return nn.Sequential(nn.Flatten(), nn.Linear(size, 8), nn.Linear(8, classes))
"""
DATA = """
def data():
    rows, labels = torch.randn(240, 1, 1, 20), torch.arange(240) % 3
    return rows[:200], labels[:200], rows[200:], labels[200:]
"""


def told(*options: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, ["advise", "--workers", "4", *options])
    return done.exit_code, " ".join(done.output.split())


@pytest.fixture
def figures(tmp_path: Path) -> str:
    save(FIGURES, tmp_path / "figures.json")
    return str(tmp_path / "figures.json")


def test_local_steps_are_told_with_their_start(figures: str) -> None:
    where = ("--link", "1mbit,20ms", "--calibration", figures, "--optimizer", "adamw")
    said = told(*where)[1]
    assert "If every step is to be sent, take int4" in said and "Better take local steps" in said
    assert "The start: 225 steps of" in said and "not trained" not in said
    assert """outer = gradwire.local(model, optimizer, "sparseloco(H=5, rate=0.7, start=225, scales='bf16')")""" in said
    for limit, H in (("1", None), ("2", 5), ("9", 30)):
        assert json.loads(told(*where, "--max-loss", limit, "--json")[1])["local_steps"]["H"] == H
    none = told(*where, "--max-loss", "1")[1]
    assert "none that were trained lost at most 1 %" in none and "outer = " not in none


def test_none_are_advised_where_none_were_trained_with_the_optimizer(figures: str) -> None:
    where = ("--link", "1mbit,20ms", "--calibration", figures, "--optimizer", "sgd")
    said = told(*where)[1]
    assert "local_sgd(H=15)" in said and "none were trained with SGD" in said and "docs/choose.md" in said
    assert "Better take" not in said and "outer = " not in said and "diloco" not in said
    assert json.loads(told(*where, "--json")[1])["local_steps"]["H"] is None
    assert "local_sgd" not in told("--link", "100gbit", "--calibration", figures, "--optimizer", "sgd")[1]


def test_compression_is_not_dismissed_where_local_steps_are_advised(tmp_path: Path) -> None:
    slow = {spec: CodingCost(9e3, 9e3) for spec in ("int8", "int4")}
    save(replace(FIGURES, costs={**FIGURES.costs, **slow}), tmp_path / "figures.json")
    where = ("--link", "1mbit,20ms", "--calibration", str(tmp_path / "figures.json"), "--optimizer", "adamw")
    said = told(*where)[1]
    assert "If every step is to be sent, stay with fp32 DDP" in said and "Compressing every step does not pay" in said


def test_figures_of_a_busy_machine_are_told_to_be_far_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "calibrate", lambda job, beside: FIGURES)
    kept = tmp_path / "figures.json"
    for load, busy in ((99.0, True), (0.0, False)):
        monkeypatch.setattr("os.getloadavg", lambda load=load: (load, load, load))
        for words in (("--link", "1gbit", "--save", str(kept)), ("--link", "1gbit", "--calibration", str(kept))):
            said = told("digits", *words)[1]
            assert ("may be far off. Repeat this when it is idle" in said and "--calibration FILE" in said) is busy
    assert calibration_cache.disturbance() == ""


def test_it_is_told_why_rounds_are_long_enough_or_lose_too_much() -> None:
    choices, chosen = local_choices(FIGURES, FAST) or ([], None)
    advice = advise(FIGURES, FAST)
    assert "H = 5 is the shortest" in why_local(advice, FIGURES.compute, choices, chosen, 0.02)
    assert "none that were trained lost at most 1 %" in why_local(advice, FIGURES.compute, choices, None, 0.01)


@pytest.mark.parametrize(("place", "long"), [(THIN, True), (FAST, False)])
def test_a_cheaper_start_is_named_if_it_takes_longer_than_the_rest(place: Cluster, long: bool) -> None:
    chosen, first = local_steps(FIGURES, place), predict(FIGURES, "int4", place)
    assert chosen is not None and (225 * first.seconds > 1275 * chosen.seconds) is long
    text = start_text(first, chosen)
    assert text.startswith("The start: 225 steps of ") and "then 1,275 steps of " in text
    assert in_seconds(225 * first.seconds) in text and in_seconds(1275 * chosen.seconds) in text
    assert ("first=None" in text) is long


def test_a_model_is_fed_the_data_of_its_own_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked: list[calibrate.CalibrationJob] = []
    monkeypatch.setattr(calibrate, "calibrate", lambda job, beside: asked.append(job) or FIGURES)
    alone, fed = tmp_path / "alone.py", tmp_path / "fed.py"
    alone.write_text(ROWS)
    fed.write_text(ROWS + DATA)
    code, said = told("--link", "1gbit", "--model", f"{alone}:make")
    assert code == 2 and "cannot be multiplied" in said and "built-in digits" in said and "training.md#models" in said
    assert told("--link", "1gbit", "--model", f"{fed}:make")[0] == 0
    made = asked.pop().make()
    assert made.model[1].weight.shape == (8, 20) and not asked
    made.loss(made.model).backward()
