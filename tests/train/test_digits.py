"""Convergence on a small real problem, four gloo workers: every method with feedback ends within a point of dense."""

import pytest
import torch

from gradwire_lab.train import digits
from gradwire_lab.train.digits import Job
from gradwire_lab.train.launch import launch

pytestmark = pytest.mark.timeout(600)  # a busy machine may take long for the one fixture

# The settings are the same but where a method needs others: one bit in both directions wants smaller steps and more of
# them, and EF21, which follows the gradient with all its noise, more entries.
JOBS = (
    Job("dgc(0.01)"),
    Job("topk(0.01) | sign"),
    Job("powersgd(2)"),
    Job("ef_signsgd", exchange="two_way", epochs=24, lr=0.03),
)
# The same law for more methods; `make study` runs these, since they take another minute.
MORE = (
    Job("topk(0.01)"),
    Job("topk(0.05) | terngrad"),
    Job("topk(0.05)", feedback="ef21"),
    Job("adacomp | sign"),
    Job("qsgd(biased=True)", feedback="residual"),
    Job("sign", exchange="allgather"),
)


def train(jobs):
    """Every rank's results by job; one set of processes for all of them."""
    ranks = launch(digits.run_all, 4, (Job("dense"), *jobs))
    return [{result["job"]: result for result in results} for results in ranks]


@pytest.fixture(scope="module")
def trained():
    return train(JOBS)


@pytest.fixture(scope="module")
def studied():
    return train(MORE)


def test_dense_training_solves_it(trained):
    dense = trained[0]["dense"]
    assert dense["accuracy"] > 0.975
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
    assert mine["accuracy"] >= dense["accuracy"] - 0.01
    assert mine["sent"] < dense["sent"]


@pytest.mark.parametrize("job", (Job("dense"), *JOBS), ids=str)
def test_all_ranks_hold_the_same_model(trained, job):
    assert len({results[str(job)]["accuracy"] for results in trained}) == 1


def test_ranks_share_every_batch_without_overlap():
    parts = [digits.shards(rank, 4, seed=3, epoch=1) for rank in range(4)]
    seen = torch.cat([torch.cat(batch) for batch in zip(*parts, strict=True)])
    assert len(seen) == len(seen.unique()) == digits.TRAIN
    assert not torch.equal(parts[0][0], digits.shards(0, 4, seed=3, epoch=2)[0])


def test_test_images_are_never_trained_on():
    train, test = digits.load()
    assert len(train.labels) + len(test.labels) == 1797
    assert len(train.labels) == digits.TRAIN
