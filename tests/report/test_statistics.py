"""Intervals, against numbers worked out by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire_lab.report.numbers import difference, ends
from gradwire_lab.report.statistics import Estimate, estimate, paired


def test_a_paired_interval_by_hand() -> None:
    dense = {0: 94.0, 1: 94.4, 2: 94.1, 3: 93.9}
    ours = {0: 93.9, 1: 94.2, 2: 94.2, 3: 93.7}
    # Differences -0.1, -0.2, +0.1, -0.2: mean -0.1; squares about it 0, 0.01, 0.04, 0.01 add up to 0.06, over 3 is
    # 0.02. Student's t for 3 degrees of freedom is 3.182446, so the interval reaches 3.182446 * sqrt(0.02 / 4).
    told = paired(ours, dense)
    assert told is not None and told.n == 4
    assert told.mean == pytest.approx(-0.1)
    assert told.spread == pytest.approx(math.sqrt(0.02))
    assert told.half_width == pytest.approx(3.182446 * math.sqrt(0.005), rel=1e-6)
    assert (told.low, told.high) == pytest.approx((-0.325033, 0.125033), abs=1e-6)


def test_pairs_are_of_the_same_seed() -> None:
    told = paired({1: 2.0, 2: 5.0, 7: 100.0}, {2: 4.0, 1: 1.0, 9: 0.0})
    assert told is not None and (told.n, told.mean) == (2, 1.0)
    assert paired({0: 1.0}, {1: 1.0}) is None


def test_one_value_has_no_spread_and_none_no_mean() -> None:
    assert estimate([3.0]) == Estimate(1, 3.0)
    with pytest.raises(ValueError, match="no mean"):
        estimate([])


def test_equal_differences_have_no_interval() -> None:
    told = paired({0: 90.1, 1: 90.3, 2: 90.7}, {0: 90.0, 1: 90.2, 2: 90.6})  # alike but for rounding
    assert told is not None and told.mean == pytest.approx(0.1)
    assert (told.spread, told.low, told.high) == (0.0, None, None)
    assert difference(told) == "+0.10" and ends(told, 0.0, 100.0) == ""
    assert difference(estimate([0.0, 0.0, 0.0])) == "+0.00"
    assert difference(Estimate(3, -0.001, 0.1, -0.3, -0.004)) == "+0.00 [-0.30, +0.00]"
    assert difference(estimate([0.0, 0.0, 0.3])) == "+0.10 [-0.33, +0.53]"


@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=30), st.floats(-1e3, 1e3))
def test_a_shift_moves_the_interval_and_no_more(values: list[float], shift: float) -> None:
    one, other = estimate(values), estimate([value + shift for value in values])
    assert other.mean == pytest.approx(one.mean + shift, abs=1e-6)
    if one.low is not None and one.high is not None:
        assert one.low <= one.mean <= one.high
    assert (other.half_width or 0.0) == pytest.approx(one.half_width or 0.0, rel=1e-6, abs=1e-6)
