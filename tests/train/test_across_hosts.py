"""A recipe with ``sync.across``: compressed between hosts, dense inside; in this process and in others."""

import json

import pytest
import torch

from gradwire_lab.train import checkpoint
from gradwire_lab.train.loop import Training
from gradwire_lab.train.rank_info import simulated_ranks
from gradwire_lab.train.record import open_folder
from gradwire_lab.train.run_modes import train_spawned
from gradwire_lab.train.run_recipe import TrainJob, restore, run_recipe
from training_fixtures import recipe_of, saved, train

OVERRIDES = ("sync.spec=topk(0.05)", "train.batch=60", "train.iterations=4", "train.save_every=2", "train.log_every=1")
PAIRS = "sync.across=[[0, 1], [2, 3]]"


class Stop(Exception):
    pass


def interrupt(record):
    if record["event"] == "step" and record["step"] == 3:
        raise Stop


def test_processes_train_as_simulated_workers_do(tmp_path):
    recipe = recipe_of("digits", *OVERRIDES, PAIRS)
    final = train(recipe, 4, tmp_path / "simulated")
    open_folder(tmp_path / "real", recipe)
    heard = train_spawned(TrainJob(recipe, tmp_path / "real"), 4, lambda record: None)
    for file in ("model.safetensors", "rank-1.safetensors", "rank-2.safetensors"):
        ours, theirs = saved(tmp_path / "simulated", file), saved(tmp_path / "real", file)
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - {"loss"}:
            assert torch.equal(ours[name], theirs[name]), (file, name)
    for name in ("sent", "received", "sent_inside", "hosts", "wire_ratio", "value"):
        assert heard[name] == final[name], name
    assert final["hosts"] == 2
    assert final["sent_inside"] > 5 * final["sent"]


def test_a_resumed_run_equals_one_that_was_not_stopped(tmp_path):
    recipe = recipe_of("digits", *OVERRIDES, PAIRS)
    through = train(recipe, 4, tmp_path / "whole")
    open_folder(tmp_path / "broken", recipe)
    with pytest.raises(Stop):
        run_recipe(TrainJob(recipe, tmp_path / "broken"), simulated_ranks(4), interrupt)
    resumed = train(recipe, 4, tmp_path / "broken", resume=True)
    for file in ("model.safetensors", *(f"rank-{rank}.safetensors" for rank in range(4))):
        ours, theirs = saved(tmp_path / "whole", file), saved(tmp_path / "broken", file)
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    timeless = {name for name in through if "seconds" not in name}
    assert {name: through[name] for name in timeless} == {name: resumed[name] for name in timeless}


@pytest.mark.parametrize("across", ["ranks", "hosts", "[[0, 2], [1, 3]]"])
def test_the_same_ranks_on_other_hosts_owe_the_same(tmp_path, across):
    train(recipe_of("digits", *OVERRIDES, PAIRS), 4, tmp_path)
    found = checkpoint.find(tmp_path, "last")
    progress = json.loads((found / "progress.json").read_text())
    debts = {}
    for arrangement in (PAIRS, f"sync.across={across}"):
        training = Training(recipe_of("digits", *OVERRIDES, arrangement), simulated_ranks(4), progress["ramp_steps"])
        restore(training, found, progress)
        assert training.step == 4
        owed = [wire.debts() for wire in training.strategy.workers.wires]
        debts[arrangement] = {name: torch.stack([debt[name] for debt in owed]).mean(0) for name in owed[0]}
    for name, debt in debts[PAIRS].items():
        torch.testing.assert_close(debts[f"sync.across={across}"][name], debt, rtol=1e-5, atol=1e-8)
    assert any(debt.any() for debt in debts[PAIRS].values())


def test_workers_of_one_machine_are_one_host(tmp_path):
    recipe = recipe_of("digits", *OVERRIDES, "sync.across=hosts")
    open_folder(tmp_path, recipe)
    final = train_spawned(TrainJob(recipe, tmp_path), 2, lambda record: None)
    assert (final["hosts"], final["sent"]) == (1, 0)
