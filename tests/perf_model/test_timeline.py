"""One step played through, against what can be said by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradwire_lab.perf_model.timeline import BucketTimeline, CommWork, simulate_step

seconds = st.floats(0, 10, allow_subnormal=False)
works = st.builds(CommWork, st.sampled_from(["encode", "wire", "decode"]), seconds, seconds)
timelines = st.lists(st.builds(BucketTimeline, st.floats(0, 1), st.tuples(works, works)), max_size=5)


def test_wire_behind_the_backward_pass_costs_nothing() -> None:
    split = simulate_step(1.0, 4.0, [BucketTimeline(0.5, (CommWork("wire", wire=2.0),))], cores=1)
    assert split.step == 5.0 and split.hidden == 2.0 and split.exposed == 0.0


def test_wire_that_outlasts_it_is_waited_for() -> None:
    split = simulate_step(
        1.0,
        4.0,
        [BucketTimeline(0.5, (CommWork("wire", wire=3.0),)), BucketTimeline(1.0, (CommWork("wire", wire=1.0),))],
        cores=1,
    )
    # The second bucket waits for the first: 2 s until it leaves, 3 s and 1 s on the wire.
    assert split.step == 1 + 2 + 3 + 1


def test_work_beside_a_busy_core_is_paid_for_in_full() -> None:
    trip = BucketTimeline(0.0, (CommWork("encode", work=1.0),))
    assert simulate_step(0.0, 4.0, [trip], cores=1).step == 5.0
    assert simulate_step(0.0, 4.0, [trip], cores=0.5).step == 5.0
    assert simulate_step(0.0, 4.0, [trip], cores=2).step == 4.0


def test_without_overlap_everything_comes_after() -> None:
    timelines = [BucketTimeline(0.1, (CommWork("encode", 1.0), CommWork("wire", wire=2.0), CommWork("decode", 0.5)))]
    split = simulate_step(1.0, 4.0, timelines, cores=4, overlaps=False)
    assert split.step == 1 + 4 + 1 + 2 + 0.5 and split.hidden == pytest.approx(0)


def test_copies_and_wire_of_a_collective_go_side_by_side() -> None:
    assert simulate_step(0.0, 1.0, [BucketTimeline(1.0, (CommWork("wire", work=0.5, wire=2.0),))], cores=1).step == 3.0
    assert simulate_step(0.0, 1.0, [BucketTimeline(1.0, (CommWork("wire", work=2.0, wire=0.5),))], cores=1).step == 3.0


@given(seconds, seconds, timelines, st.floats(0.1, 4))
def test_a_step_lies_between_its_longest_part_and_their_sum(
    forward: float, backward: float, taken: list[BucketTimeline], cores: float
) -> None:
    taken = sorted(taken, key=lambda trip: trip.ready)
    split = simulate_step(forward, backward, taken, cores)
    work = sum(act.work for trip in taken for act in trip.parts)
    total = sum(act.alone for trip in taken for act in trip.parts)
    floor = max(forward + backward, forward + total if cores >= 2 else 0.0)
    assert floor - 1e-6 <= split.step <= forward + backward + total + work + 1e-6
    assert split.compute == pytest.approx(forward + backward)
    assert split.encode + split.wire + split.decode == pytest.approx(total, abs=1e-6)
    assert split.hidden <= min(backward, total) + 1e-6, "only the backward pass can hide anything"
    slower = simulate_step(forward, backward, taken, min(cores, 1.0))
    assert slower.step >= split.step - 1e-6
