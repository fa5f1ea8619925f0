"""A host that is cut off in the middle of a training: named within the timeout, and a checkpoint to go on from."""

import sys
import time
from pathlib import Path

import pytest

from gradwire_lab.network import Hosts, LinkSpec, namespaces
from gradwire_lab.train import checkpoint
from gradwire_lab.train.rank_info import simulated_ranks
from gradwire_lab.train.run_recipe import TrainJob, run_recipe
from training_fixtures import recipe_of, saved, train

real = pytest.mark.skipif(bool(namespaces.lacking()), reason=namespaces.lacking() or "hosts can be made")
TIMEOUT = 5.0
OVERRIDES = (
    "sync.spec=topk(0.05)",
    "sync.across=hosts",
    f"sync.timeout={TIMEOUT}",
    "train.batch=60",
    "train.epochs=500",
    "train.save_every=2",
    "model.options={width=4}",
)


@real
def test_a_cut_host_is_named_and_its_run_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    cut_at: list[float] = []
    lines: list[str] = []
    settings = [word for override in OVERRIDES for word in ("--set", override)]
    argv = [str(Path(sys.executable).parent / "gradwire"), "train", "digits", *settings, "--folder", str(run)]

    with Hosts(2, LinkSpec.parse("100mbit")) as hosts:

        def listen(rank: int, line: str) -> None:
            lines.append(f"{rank}: {line}")
            if line.startswith("epoch") and not cut_at and checkpoint.find(run, "last") is not None:
                hosts.cut(2)
                cut_at.append(time.monotonic())

        env = {"GRADWIRE_KERNELS": "reference"}  # nothing to compile, which ranks might do one after the other
        ended = hosts.run(argv, env, per_host=2, timeout_seconds=200, grace_seconds=3, sink=listen)
        took = time.monotonic() - cut_at[0] if cut_at else 0.0
        there, gone = hosts.addresses
    assert cut_at, "\n".join(lines)
    assert ended.code == 1, (ended, lines)
    assert took < TIMEOUT + 4 + 3 + 20, "the timeout, the roll call, the grace, and a busy machine"
    assert f"Cut off, its link is down: host 2 ({gone})." in ended.why
    said = " ".join(line for line in lines if line[0] in "01")  # those whose host was not cut
    assert f"{there} cannot reach rank 2 and 3 on {gone}" in said, said
    assert "--resume" in said
    goes_on(run, tmp_path / "whole")


def goes_on(run: Path, other: Path) -> None:
    """From the last checkpoint, as if nothing had happened."""
    found = checkpoint.find(run, "last")
    assert found is not None
    steps = int(found.name.removeprefix("step-")) + 3
    recipe = recipe_of("digits", *OVERRIDES, f"train.iterations={steps}", "sync.across=[[0, 1], [2, 3]]")
    final = run_recipe(TrainJob(recipe, run, resume=True), simulated_ranks(4), lambda record: None)
    assert final["step"] == steps
    train(recipe, 4, other)
    for name, value in saved(other).items():
        assert value.equal(saved(run)[name]), name
