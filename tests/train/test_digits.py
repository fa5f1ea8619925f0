"""Convergence on a small real problem, four gloo workers: every method with feedback ends within a point of dense."""

import pytest

from gradwire_lab.launch import launch
from gradwire_lab.train.demo import DemoJob, train_all

pytestmark = pytest.mark.timeout(600)  # a busy machine may take long for the one fixture

# The settings are the same but where a method needs others: one bit in both directions wants smaller steps and more of
# them, and EF21, which follows the gradient with all its noise, more entries.
JOBS = (
    DemoJob("dgc(0.01)"),
    DemoJob("topk(0.01) | sign"),
    DemoJob("powersgd(2)"),
    DemoJob("ef_signsgd", exchange="two_way", epochs=24, lr=0.03),
)
# The same law for more methods; `make study` runs these, since they take another minute.
MORE = (
    DemoJob("topk(0.01)"),
    DemoJob("topk(0.05) | terngrad"),
    DemoJob("topk(0.05)", feedback="ef21"),
    DemoJob("adacomp | sign"),
    DemoJob("qsgd(biased=True)", feedback="residual"),
    DemoJob("sign", exchange="allgather"),
)


def train(jobs):
    """Every rank's results by job; one set of processes for all of them."""
    ranks = launch(train_all, 4, (DemoJob("dense"), *jobs))
    return [{result["job"]: result for result in results} for results in ranks]


@pytest.fixture(scope="module")
def trained():
    return train(JOBS)


@pytest.fixture(scope="module")
def studied():
    return train(MORE)


def test_dense_training_solves_it(trained):
    dense = trained[0]["dense"]
    assert dense["value"] > 0.975
    assert dense["wire_ratio"] == pytest.approx(1.0, rel=1e-3)


@pytest.mark.parametrize("job", JOBS, ids=str)
def test_ends_within_a_point_of_dense(trained, job):
    check(trained, job)


@pytest.mark.study
@pytest.mark.parametrize("job", MORE, ids=str)
def test_ends_within_a_point_of_dense_too(studied, job):
    check(studied, job)


def check(trained, job):
    dense, mine = trained[0]["dense"], trained[0][str(job)]
    assert mine["skipped"] == 0
    assert mine["value"] >= dense["value"] - 0.01
    assert mine["sent"] < dense["sent"]


@pytest.mark.parametrize("job", (DemoJob("dense"), *JOBS), ids=str)
def test_all_ranks_hold_the_same_model(trained, job):
    assert len({results[str(job)]["value"] for results in trained}) == 1
