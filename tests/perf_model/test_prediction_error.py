"""Predicted steps beside measured ones: what is compared with what."""

from collections.abc import Sequence
from typing import Any

import pytest

from gradwire.comm.rates import LinkSpec
from gradwire.engine.plan import BUCKET_BYTES
from gradwire_lab.bench.network import prediction_error
from gradwire_lab.bench.network.prediction_error import ChoiceComparison, StepComparison, Way, compare
from gradwire_lab.perf_model.calibration import Calibration, CodingCost
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import predict
from gradwire_lab.perf_model.model import ModelProfile

TOP, LOW = "topk(0.001) | sign", "powersgd(4)"  # the first of which lost accuracy in the project's own trainings
FIGURES = Calibration(
    ModelProfile({"embed": (10_000, 650), "head": (10_000, 650)}),
    0.1,
    0.2,
    {
        "ddp-fp32": CodingCost(0.0, 0.0),
        "ddp-fp16": CodingCost(0.01, 0.01),
        TOP: CodingCost(0.02, 0.01),
        LOW: CodingCost(0.05, 0.05),
    },
    world=4,
)


def row(method: str, seconds: float) -> dict[str, Any]:
    place = {"model": "lstm", "link": "100mbit", "world": 4, "where": "hosts"}
    return {**place, "method": method, "step_ms": 1e3 * seconds}


def predicted(spec: str, bucket_bytes: int = BUCKET_BYTES) -> float:
    return predict(FIGURES, spec, Cluster(4, LinkSpec.parse("100mbit")), bucket_sizes=(bucket_bytes,)).seconds


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """What is calibrated."""
    found: list[tuple[str, ...]] = []

    def calibrated(model: str, specs: Sequence[str], world: int, where: str) -> Calibration:
        found.append(tuple(specs))
        return FIGURES

    monkeypatch.setattr(prediction_error, "calibrated", calibrated)
    return found


def test_methods_are_read_as_forecasts_know_them() -> None:
    assert Way.of("ddp-fp16") == Way("ddp-fp16")
    assert Way.of("int8; exchange=two_way") == Way("int8; exchange=two_way")
    assert Way.of("topk(0.1); rollback=false") == Way("topk(0.1)")
    for size in ("bucket_mb=200", "launch_mb=200"):  # the second in records of an earlier release
        assert Way.of(f"topk(0.1); bundle=none; {size}") == Way("topk(0.1); bundle=none", 200 * 2**20)
    for unknown in ("ddp-powersgd", "ddp-none", "gossip:choco(ring)", "auto"):
        assert Way.of(unknown) is None


def test_every_cell_is_compared_with_its_own_buckets(asked: list[tuple[str, ...]]) -> None:
    large = f"{TOP}; bucket_mb=200"
    rows = [
        row("ddp-none", 0.3),
        row("ddp-powersgd", 0.9),
        row("ddp-fp32", predicted("ddp-fp32")),
        row(TOP, predicted(TOP)),
        row(large, 2 * predicted(TOP, 200 * 2**20)),
    ]
    errors = {one.row["method"]: one.error for one in compare(rows) if isinstance(one, StepComparison)}
    assert errors == pytest.approx({"ddp-none": 0.0, "ddp-fp32": 0.0, TOP: 0.0, large: -0.5})
    assert asked == [(TOP,)], "a spec is measured once, however its buckets are cut"


def test_the_time_left_follows_each_calibration(asked: list[tuple[str, ...]]) -> None:
    lines: list[str] = []
    rows = [row("ddp-fp32", 0.1) | {"world": world} for world in (2, 4, 8)]
    list(prediction_error.compare(rows, lines.append))
    assert ["left" in line for line in lines] == [False, True, True]


def test_what_is_taken_is_scored_by_what_it_took(asked: list[tuple[str, ...]]) -> None:
    rows = [row("ddp-fp32", 8.0), row("ddp-fp16", 4.0), row(TOP, 0.4), row(LOW, 0.6)]
    free, careful = (one for one in compare(rows) if isinstance(one, ChoiceComparison))
    assert (free.choice, free.best, free.regret, free.sound) == (TOP, TOP, 0.0, False)
    assert (careful.choice, careful.best, careful.regret, careful.sound) == (LOW, LOW, 0.0, True)
    rows = [row("ddp-fp16", 4.0), row(TOP, 0.9), row(LOW, 0.6)]
    assert next(one for one in compare(rows) if isinstance(one, ChoiceComparison)).regret == pytest.approx(0.5)
