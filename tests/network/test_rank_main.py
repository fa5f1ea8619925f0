"""What the turns of ranks say together."""

from typing import Any

import pytest

from gradwire_lab.bench.network.methods import NO_COMM
from gradwire_lab.bench.network.rank_main import summarize


def turn(method: str, number: int, *seconds: float) -> dict[str, Any]:
    return {"method": method, "round": number, "seconds": list(seconds), "nic": 10.0 * number}


def test_ranks_that_never_meet_are_timed_while_all_of_them_run() -> None:
    """Three on two cores: one has a core for itself, two share the other; then these have a core each."""
    alone, sharing = (0.1,) * 4, (0.2, 0.2, 0.1, 0.1)
    turns = [turn(NO_COMM, number, *seconds) for number in (1, 2, 3) for seconds in (alone, sharing, sharing)]
    assert summarize(turns)["step_ms"] == pytest.approx(150), "8 steps in 0.4 s, by three ranks"
    even = [turn(NO_COMM, 1, 0.15, 0.15), turn(NO_COMM, 1, 0.15, 0.15)]
    assert summarize(even)["step_ms"] == pytest.approx(150)


def test_steps_that_wait_for_all_are_told_by_their_median() -> None:
    turns = [turn("ddp-fp32", number, 0.2, 0.2, 0.2, 5.0) for number in (1, 2)]
    row = summarize(turns)
    assert row["step_ms"] == pytest.approx(200) and row["steps"] == 8 and row["nic"] == pytest.approx(15)


def test_of_rounds_a_step_is_the_mean() -> None:
    turns = [{**turn("local:local_sgd(H=4)", 1, 0.1, 0.1, 0.1, 0.5), "period": 4}]
    assert summarize(turns)["step_ms"] == pytest.approx(200)


def test_what_decides_for_itself_says_what_it_became() -> None:
    turns = [{**turn("auto", number, 0.2, 0.2), "became": spec} for number, spec in enumerate(("bf16", "fp32", "bf16"))]
    assert summarize(turns)["became"] == "bf16, fp32"
    assert "became" not in summarize([turn("ddp-fp32", 0, 0.2, 0.2)])
