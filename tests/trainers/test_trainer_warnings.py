"""What a trainer's callback advises where a training would never leave its start."""

import pytest

from gradwire.integrations.trainer_warnings import FEWEST, warn_long_start


@pytest.mark.parametrize(
    ("max_steps", "fewest", "advice"),
    [
        (250, FEWEST, "such as start=100, into the spec: 15 % of the training, but no fewer than 100 steps"),
        (1000, FEWEST, "such as start=150, into the spec"),
        (60, FEWEST, "no fewer than 100 steps: train for longer, or take int4, which has no start"),
        (60, 1, "such as start=9, into the spec: 15 % of the training$"),
    ],
)
def test_a_start_is_15_percent_and_not_too_short(max_steps: int, fewest: int, advice: str) -> None:
    with pytest.warns(UserWarning, match=rf"takes 2000 of {max_steps} steps.*{advice}"):
        warn_long_start(2000, max_steps, "onebit_adam(start=2000)", fewest)
