"""What a trainer's callback advises where a start does not suit the training."""

import math
import warnings

import pytest

from gradwire.integrations.trainer_warnings import warn_of_start


@pytest.mark.parametrize(
    ("max_steps", "measures", "advice"),
    [
        (250, True, "write start=100 into the spec: 15 % of the training, but no fewer than 100 steps"),
        (1000, True, "write start=150 into the spec"),
        (60, True, "no fewer than 100 steps: train for longer, or take int4, which has no start"),
        (60, False, "write start=9 into the spec: 15 % of the training$"),
    ],
)
def test_a_start_that_is_all_of_the_training(max_steps: int, measures: bool, advice: str) -> None:
    told = rf"takes 2,000 of {max_steps:,} steps, so that the training never leaves it.*{advice}"
    with pytest.warns(UserWarning, match=told):
        warn_of_start(2000, max_steps, "onebit_adam(start=2000)", measures)


def test_a_start_that_is_too_short_for_a_variance() -> None:
    with pytest.warns(
        UserWarning, match=r"takes 256 of 20,000 steps, which is 1\.3 %.*write start=3000 into the spec: 15 %"
    ):
        warn_of_start(256, 20_000, "onebit_adam")
    with pytest.warns(UserWarning, match=r"takes 5 of 100 steps.*train for longer, or take int4"):
        warn_of_start(5, 100, "onebit_adam(start=5)")


@pytest.mark.parametrize(
    ("start", "max_steps", "measures"),
    [(256, 2560, True), (2, 2000, False), (0, 2000, True), (256, math.inf, True), (256, -1, True)],
)
def test_a_start_that_suits_or_whose_share_is_not_known(start: int, max_steps: float, measures: bool) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warn_of_start(start, max_steps, "onebit_adam", measures)
    assert not seen
