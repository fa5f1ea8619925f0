"""Local steps as `gradwire advise` tells of them, and models of a user's own that it is asked about."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradwire.comm.rates import LinkSpec
from gradwire_lab.bench.network import calibrate, calibration_cache
from gradwire_lab.cli.local_text import phases_text, why_local
from gradwire_lab.cli.main import app
from gradwire_lab.perf_model.accuracy_records import MAX_LOSS
from gradwire_lab.perf_model.advice import advise
from gradwire_lab.perf_model.calibration import Calibration, CodingCost, save
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import predict
from gradwire_lab.perf_model.local_steps import SPARSE, LocalComparison, local_comparison
from gradwire_lab.perf_model.model import ModelProfile
from gradwire_lab.perf_model.training_time import Phase, single_steps
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


def compared(figures: Calibration, place: Cluster, **more: Any) -> LocalComparison:
    """Local steps beside the way of single steps that is advised."""
    single = single_steps(figures, place, advise(figures, place, ("int8", "int4")).choice, "AdamW")
    found = local_comparison(figures, place, replace(single, **more))
    assert found is not None
    return found


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
    assert "If every step is to be sent, take int4" in said and "every step, int4" in said
    assert "The start: 55 steps of" in said and "not trained" not in said
    assert """outer = gradwire.local(model, optimizer, "sparseloco(H=1, keep=1.0, start=55, scales='bf16')")""" in said
    for limit, H in (("1", 1), ("2", 1), ("9", 5)):
        assert json.loads(told(*where, "--max-loss", limit, "--json")[1])["local_steps"]["H"] == H


def test_local_steps_that_lose_more_than_the_limit_are_told_with_what_allows_them(figures: str) -> None:
    where = ("--link", "1mbit,20ms", "--calibration", figures, "--optimizer", "adamw")
    said, found = told(*where)[1], json.loads(told(*where, "--json")[1])["local_steps"]
    assert said == told(*where, "--max-loss", f"{100 * MAX_LOSS:g}")[1], "this is the default"
    assert "Take local steps if about 1.9 % more loss will do" in said and "Better take" not in said
    assert "all lost more than 1 %, the limit. Of those 1.5 times faster, H = 1 lost least; " in said
    assert "--max-loss 2 accepts that." in said
    assert "* lost least of those 1.5 times faster, but more than the limit. " in said and "recommended" not in said
    assert found["loses_more"] and found["loss"]["increase"] > found["max_loss"] == MAX_LOSS
    allowed = told(*where, "--max-loss", "2")[1]
    assert "Better take local steps" in allowed and "H = 1 is the fastest. " in allowed and "* recommended. " in allowed
    assert not json.loads(told(*where, "--max-loss", "2", "--json")[1])["local_steps"]["loses_more"]


def test_one_limit_holds_for_single_steps_and_for_local_ones(figures: str) -> None:
    where = ("--link", "10mbit", "--calibration", figures, "--optimizer", "muon")
    for limit, choice, H in (("1", "int8", 5), ("3", "int4", 5), ("0.3", "int8", 1)):
        said = told(*where, "--max-loss", limit)[1]
        found = json.loads(told(*where, "--max-loss", limit, "--json")[1])
        assert found["choice"] == choice and found["local_steps"]["H"] == H
        assert f"lost at most {limit} % more than dense (--max-loss)" in said and f"lost < {limit} %" in said
        assert (f"no: lost > {limit} %" in said) is (choice == "int8")


def test_rounds_that_were_trained_with_muon_are_advised_for_it(figures: str) -> None:
    where = ("--link", "1mbit,20ms", "--calibration", figures, "--optimizer", "muon")
    said, found = told(*where)[1], json.loads(told(*where, "--json")[1])["local_steps"]
    assert "If every step is to be sent, take int8" in said and "models with Muon" in said and "AdamW" not in said
    assert [one["loss"]["evidence"][0]["optimizer"] for one in found["choices"]] == ["Muon"] * 3
    assert "H = 1, then 5 from step 1,100 is the fastest" in said and "2.9 % (Python sources" in said
    assert "1,100 steps of" in said and "then 400 steps of" in said and "281 times fewer bytes" in said
    assert f"outer = gradwire.local(model, [muon, adamw], {json.dumps(found['spec'])})" in said
    before, after = found["phases"]
    assert (before["H"], before["steps"], after["H"], after["steps"]) == (1, 1100, 5, 400)
    assert before["sent"] == 5 * after["sent"] and found["seconds"] == after["seconds"] < before["seconds"]
    assert found["total_seconds"] == pytest.approx(1100 * before["seconds"] + 400 * after["seconds"])
    strict = json.loads(told(*where, "--max-loss", "0.3", "--json")[1])["local_steps"]
    assert strict["H"] == 1, "what lost more is not proposed"


def test_figures_tell_the_kind_of_model_whose_trainings_are_weighed(tmp_path: Path) -> None:
    model = ModelProfile({"embedding": (10_000, 650), "layers.0.weight_hh_l0": (2600, 650)})
    costs = {spec: CodingCost(0.0, 0.0) for spec in ("ddp-fp32", "int4", "topk(0.01) | sign", "topk(0.001) | fp16")}
    save(replace(FIGURES, model=model, costs=costs), tmp_path / "figures.json")
    where = ("--link", "10mbit", "--calibration", str(tmp_path / "figures.json"))
    said, found = told(*where)[1], json.loads(told(*where, "--json")[1])
    assert found["kind"] == "recurrent" and found["choice"] == "topk(0.001) | fp16"
    assert "Evidence is of recurrent models with SGD, unless it names others" in said
    assert "lost < 1 % (convolutional)" in said, "there is none of int4 and an LSTM"


def test_none_are_advised_where_none_were_trained_with_the_optimizer(figures: str) -> None:
    where = ("--link", "1mbit,20ms", "--calibration", figures, "--optimizer", "sgd")
    said = told(*where)[1]
    assert "local_sgd(H=15)" in said and "none were trained with SGD" in said and "docs/choose.md" in said
    assert "Better take" not in said and "outer = " not in said and "diloco" not in said
    assert json.loads(told(*where, "--json")[1])["local_steps"]["H"] is None
    assert "local_sgd" not in told("--link", "100gbit", "--calibration", figures, "--optimizer", "sgd")[1]


def test_compression_is_not_dismissed_where_local_steps_are_advised(tmp_path: Path) -> None:
    slow = {spec: CodingCost(5e2, 5e2) for spec in ("int8", "int4")}
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
    slow = compared(FIGURES, FAST, phases=(Phase(1500, None, 1.0, 1.0),))
    assert "H = 1 lost least" in why_local(FIGURES, slow)
    fast = next(one for one in slow.choices if one.lengths == "5")
    assert "H = 5 is the fastest" in why_local(FIGURES, replace(slow, chosen=fast, max_loss=0.02))
    none = why_local(FIGURES, replace(slow, chosen=None))
    assert "of those that were trained, none make 1,500 steps 1.5 times faster" in none


@pytest.mark.parametrize(("place", "long"), [(THIN, True), (FAST, False)])
def test_a_cheaper_start_is_named_if_it_takes_longer_than_the_rest(place: Cluster, long: bool) -> None:
    (chosen,) = (one for one in compared(FIGURES, place).choices if one.lengths == "5")
    first = predict(FIGURES, "int4", place)
    assert (225 * first.seconds > 1275 * chosen.seconds) is long
    text = phases_text(chosen)
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
