"""Convergence on a small real problem, four workers: every method with feedback ends within a point of dense.

They train in one process, in a third of the time. `test_loop` and `test_lockstep_equals_gloo` hold that processes train
alike, and `make study` trains the same in processes.
"""

import pytest
import torch

import fixtures
from gradwire_lab.launch import launch
from gradwire_lab.train.demo import DemoJob, train_all
from gradwire_lab.train.loop import Training
from gradwire_lab.train.rank_info import RankInfo, simulated_ranks
from gradwire_lab.train.recipe_files import resolve
from spawn import Answers, cases_fixture

WORLD = 4
DENSE = DemoJob("dense")
# The settings are the same but where a method needs others: one bit in both directions wants smaller steps and more of
# them, and EF21, which follows the gradient with all its noise, more entries.
JOBS = (
    DemoJob("dgc(0.01)"),
    DemoJob("topk(0.01) | sign"),
    DemoJob("powersgd(2)"),
    DemoJob("ef_signsgd", exchange="two_way", epochs=24, lr=0.03),
)
# The same law for more methods; `make study` runs these.
MORE = (
    DemoJob("topk(0.01)"),
    DemoJob("topk(0.05) | terngrad"),
    DemoJob("topk(0.05)", feedback="ef21"),
    DemoJob("adacomp | sign"),
    DemoJob("qsgd(biased=True)", feedback="residual"),
    DemoJob("sign", exchange="allgather"),
)
CASES = {str(job): job for job in (DENSE, *JOBS)}

each_job = pytest.mark.parametrize(
    "job", [*JOBS, *(pytest.param(job, marks=pytest.mark.study) for job in MORE)], ids=str
)


def training(job: DemoJob, place: RankInfo, epochs: int | None = None) -> Training:
    sync = {"spec": job.spec, "feedback": job.feedback or "auto", "exchange": job.exchange or "auto"}
    settings = {"train.epochs": epochs or job.epochs, "optimizer.lr": job.lr, "data.options.standardize": "true"}
    settings |= {f"sync.{name}": value for name, value in sync.items()} | {"train.eval_every": 100}  # at the end alone
    return Training(resolve(["digits"], [f"{key}={value}" for key, value in settings.items()]), place)


def trained(job: DemoJob) -> dict:
    return training(job, simulated_ranks(WORLD)).run(lambda record: None, lambda *_: None)


@pytest.fixture(scope="module")
def dense() -> dict:
    return trained(DENSE)


def test_dense_training_solves_it(dense: dict) -> None:
    assert dense["value"] > 0.975
    assert dense["wire_ratio"] == pytest.approx(1.0, rel=1e-3)


def check(dense: dict, mine: dict) -> None:
    assert mine["skipped"] == 0
    assert mine["value"] >= dense["value"] - 0.01
    assert mine["sent"] < dense["sent"]


@each_job
def test_ends_within_a_point_of_dense(dense: dict, job: DemoJob) -> None:
    check(dense, trained(job))


@pytest.fixture(scope="module")
def in_processes() -> dict[str, dict]:
    results, *_ = launch(train_all, WORLD, (DENSE, *JOBS, *MORE))
    return {result["job"]: result for result in results}


@pytest.mark.study
@pytest.mark.timeout(600)
@each_job
def test_processes_end_within_a_point_of_dense(in_processes: dict[str, dict], job: DemoJob) -> None:
    check(in_processes["dense"], in_processes[str(job)])


def holds_the_same_model(rank: int, world: int, job: DemoJob) -> bool:
    short = training(job, RankInfo(world, (rank,), torch.device("cpu")), epochs=1)
    short.run(lambda record: None, lambda *_: None)
    return all([fixtures.same_on_all_ranks(p.detach()) for p in short.model.parameters()])


answers = cases_fixture(holds_the_same_model, WORLD, CASES)


@pytest.mark.parametrize("case", CASES)
def test_all_ranks_hold_the_same_model(case: str, answers: Answers) -> None:
    assert answers[case] == [True] * WORLD
