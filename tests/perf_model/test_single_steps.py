"""Local steps are recommended only where a whole training is clearly faster than the best way of single steps."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from gradwire.comm.rates import LinkSpec
from gradwire_lab.cli.main import app
from gradwire_lab.cli.simulated_models import simulated_models
from gradwire_lab.perf_model.advice import ERROR
from gradwire_lab.perf_model.calibration import Calibration, CodingCost, save
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import predict
from gradwire_lab.perf_model.local_steps import FASTER, SPARSE, local_choices, to_take
from gradwire_lab.perf_model.model import ModelProfile
from gradwire_lab.perf_model.simulation import ADAPTIVE, grid, judge
from gradwire_lab.perf_model.software import Software
from gradwire_lab.perf_model.training_time import SingleSteps, single_steps

ONEBIT = "onebit_adam(start=450)"
COSTS = {
    "ddp-fp32": CodingCost(0.0, 0.0),
    "ddp-fp16": CodingCost(0.0, 0.0),
    "int8": CodingCost(0.004, 0.001),
    "int4": CodingCost(0.001, 0.001),
    ONEBIT: CodingCost(0.001, 0.001),
    SPARSE: CodingCost(0.012, 0.002),
}
# A small GPT, whose collectives cost more in software than on a fast link.
SMALL = Calibration(
    ModelProfile({"tokens": (256, 64), "attn": (768, 192), "bias": (768,), "head": (64, 256)}),
    0.007,
    0.014,
    COSTS,
    software=Software({"all_reduce": 0.007, "all_gather": 0.0003, "all_to_all": 0.008}, {}, 2),
    note="by hand",
)
LARGE = replace(SMALL, model=ModelProfile({"tokens": (10_000, 650), "attn": (2600, 1300), "head": (10_000, 650)}))


@pytest.fixture
def figures(tmp_path: Path) -> str:
    save(SMALL, tmp_path / "figures.json")
    return str(tmp_path / "figures.json")


def told(figures: str, link: str, optimizer: str) -> tuple[str, dict[str, Any]]:
    """What people read, and what programs do."""
    words = ["advise", "--workers", "2", "--link", link, "--optimizer", optimizer, "--calibration", figures]
    said, read = (CliRunner().invoke(app, [*words, *more]).output for more in ((), ("--json",)))
    return " ".join(said.split()), json.loads(read)


def single(spec: str, link: str, figures: Calibration = LARGE) -> SingleSteps:
    there = Cluster(2, LinkSpec.parse(link))
    return single_steps(figures, there, predict(figures, spec, there), "AdamW")


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_local_steps_that_are_hardly_faster_are_not_recommended(figures: str, optimizer: str) -> None:
    said, found = told(figures, "10gbit,50us", optimizer)
    local = found["local_steps"]
    assert local["H"] is None and "outer = " not in said and "Better take" not in said and "recommended. " not in said
    assert "Local steps are not recommended" in said and "none make 1,500 steps 1.5 times faster" in said
    assert "every step, ddp-fp16" in said and local["every_step"]["spec"] == found["choice"] == "ddp-fp16"
    fastest = min(one["total_seconds"] for one in local["choices"])
    assert fastest > local["every_step"]["total_seconds"] / FASTER


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_text_and_json_recommend_the_same_on_all_links(figures: str, optimizer: str) -> None:
    seen = set()
    for link in ("1mbit,5ms", "10mbit,1ms", "100mbit,1ms", "1gbit,100us", "100gbit,10us"):
        said, found = told(figures, link, optimizer)
        local = found["local_steps"]
        taken = local["H"] is not None
        assert taken is ("outer = " in said) is ("ake local steps" in said)
        assert local["loses_more"] is ("accepts that" in said) is (taken and local["loss"]["increase"] > 0.01)
        assert not taken or FASTER * local["total_seconds"] <= local["every_step"]["total_seconds"]
        seen.add(taken)
    assert seen == {True, False}


def test_a_gain_is_more_than_errors_of_both_figures() -> None:
    assert (1 + ERROR) / (1 - ERROR) < FASTER
    choices = local_choices(LARGE, Cluster(2, LinkSpec.parse("10mbit"))) or ()
    best = to_take(choices, 1e9)
    assert best is not None and best.H == 1
    for factor, taken in ((1.01, True), (0.99, False)):
        found = to_take([best], factor * FASTER * best.total_seconds)
        assert (found == best) is taken


def test_a_link_is_said_to_be_slow_only_where_bytes_are_waited_for(figures: str) -> None:
    said = told(figures, "10gbit,50us", "adamw")[0]
    assert "link is too slow" not in said
    assert "On a link without a limit it would take 1.34 times its computing: coding, delays and software" in said
    said = told(figures, "1mbit,5ms", "muon")[0]
    assert "This link is too slow for int8 in every step" in said and "without a limit" not in said


def test_single_steps_have_a_start_and_a_loss() -> None:
    found, plain = single(ONEBIT, "10mbit"), single("ddp-fp16", "10mbit")
    assert [phase.steps for phase in found.phases] == [270, 180, 1050] and plain.phases[0].steps == 1500
    two, four, one = (phase.sent for phase in found.phases)
    assert one < two < four == predict(LARGE, "int4", Cluster(2, LinkSpec.parse("10mbit"))).sent
    assert found.total_seconds == pytest.approx(sum(part.steps * part.seconds for part in found.phases))
    assert found.increase is not None and abs(found.increase) < 0.001 and plain.increase == 0.0
    assert single("onebit_adam(start=450)", "10mbit").unlimited_seconds < found.total_seconds / 10
    long = "onebit_adam(start=2000)"
    cut = single(long, "10mbit", replace(LARGE, costs={**COSTS, long: CodingCost(0.0, 0.0)}))
    assert [phase.steps for phase in cut.phases] == [1200, 300, 0] and cut.increase is None
    assert single(SPARSE, "10mbit").phases[0].steps == 256


def test_rows_of_a_simulation_name_rounds_only_where_they_are_clearly_faster() -> None:
    assert ADAPTIVE == ("int8", "int4")
    rows = [judge(cell) for cell in grid(simulated_models()[:2], [8], ["10mbit,20ms", "25gbit,20us", "400gbit,5us"])]
    assert {row["local_H"] is None for row in rows} == {True, False}
    for row in rows:
        assert row["adamw_choice"] in (*ADAPTIVE, "ddp-fp32", "ddp-bf16")
        if row["local_H"] is not None:
            assert FASTER * row["local_total_seconds"] <= 1500 * row["adamw_seconds"]
