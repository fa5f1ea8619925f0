"""Going on from a checkpoint is going on as if nothing had happened."""

import json

import pytest
import torch
from safetensors.torch import save_file

import gradwire
from gradwire_lab.train import checkpoint
from gradwire_lab.train.loop import Training
from gradwire_lab.train.rank_info import simulated_ranks
from gradwire_lab.train.record import open_folder
from gradwire_lab.train.run_folder import read
from gradwire_lab.train.run_recipe import TrainJob, restore, run_recipe, save
from training_fixtures import recipe_of, saved, train

KINDS = [
    ("digits", ("sync.spec=dgc(0.02)", "sync.ramp=1", "optimizer.weight_decay=1e-3", "train.save_every=3")),
    ("digits", ("sync.spec=topk(0.05)|terngrad", "optimizer.momentum=0.9", "data.crop=1", "train.save_every=3")),
    ("pydoc-lstm", ("sync.spec=randomk(0.1)", "sync.feedback=residual", "train.save_every=3")),  # within an epoch
    ("pydoc-gpt", ("sync.spec=sign", "train.save_every=3")),
    ("pydoc-gpt", ("sync.spec=zero_one_adam(start=2, per=16, refresh=1)", "train.save_every=3", "train.iterations=6")),
    ("digits", ("train.precision=fp16", "sync.spec=topk(0.05)", "optimizer.lr=1e-3", "train.save_every=3")),
]


class Stop(Exception):
    pass


def stop_at(step):
    def listen(record):
        if record["event"] == "step" and record["step"] >= step:
            raise Stop

    return listen


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


@pytest.mark.filterwarnings("ignore::gradwire.OptimizerWarning")  # sign before AdamW
@pytest.mark.parametrize(("name", "overrides"), KINDS)
def test_a_resumed_run_equals_one_that_was_not_stopped(tmp_path, name, overrides):
    recipe = recipe_of(name, *overrides, "train.log_every=1")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    through = train(recipe, 2, whole)
    open_folder(broken, recipe)
    with pytest.raises(Stop):
        run_recipe(TrainJob(recipe, broken), simulated_ranks(2), stop_at(4))
    assert saved(broken).keys() == saved(whole).keys()
    resumed = train(recipe, 2, broken, resume=True)
    for file in ("model.safetensors", "optimizer.safetensors", "rank-0.safetensors", "rank-1.safetensors"):
        same(saved(whole, file), saved(broken, file))
    scalers = [
        json.loads((checkpoint.find(run, "last") / "progress.json").read_text())["scaler"] for run in (whole, broken)
    ]
    assert scalers[0] == scalers[1] and (scalers[0] is not None) == (recipe.train.precision == "fp16")
    timeless = {name for name in through if "seconds" not in name}
    assert {name: through[name] for name in timeless} == {name: resumed[name] for name in timeless}
    steps = [record["step"] for record in read(broken) if record["event"] == "step"]
    assert steps == sorted(set(steps)) == [record["step"] for record in read(whole) if record["event"] == "step"]


def test_a_world_of_one_takes_over_what_two_still_owe(tmp_path):
    recipe = recipe_of("digits", "sync.spec=topk(0.05)", "sync.ramp=1")
    train(recipe, 2, tmp_path)
    found = checkpoint.find(tmp_path, "last")
    progress = json.loads((found / "progress.json").read_text())
    one = Training(recipe, simulated_ranks(1), progress["ramp_steps"])
    restore(one, found, progress)
    debts = [checkpoint.part(state, "wire/residual/") for state in checkpoint.rank_states(found, (0, 1))]
    for name, debt in one.strategy.workers.wire.debts().items():
        torch.testing.assert_close(debt.flatten(), (debts[0][name] + debts[1][name]) / 2)
    assert (one.epoch, one.at, one.step) == (2, 0, 2 * one.loader.steps)


def test_a_run_goes_on_with_another_number_of_workers(tmp_path):
    by_two = train(recipe_of("digits"), 2, tmp_path)
    final = train(recipe_of("digits", "train.epochs=3"), 4, tmp_path, resume=True)
    assert final["epoch"] == 3
    # A float32 ring sends 2 (n - 1) / n of the gradients: once of what two made, one and a half times of the rest.
    assert final["ring"] == by_two["dense"] + 1.5 * (final["dense"] - by_two["dense"])
    assert by_two["wire_ratio"] == by_two["dense"] / by_two["sent"]
    assert final["wire_ratio"] == final["ring"] / final["sent"] < by_two["wire_ratio"]
    assert len(list((checkpoint.find(tmp_path, "last")).glob("rank-*"))) == 4


def test_a_finished_run_is_not_trained_again(tmp_path):
    recipe = recipe_of("digits")
    before = train(recipe, 2, tmp_path)
    again = train(recipe, 2, tmp_path, resume=True)
    assert (again["step"], again["value"]) == (before["step"], before["value"])


def test_another_spec_is_refused(tmp_path):
    train(recipe_of("digits"), 1, tmp_path)
    with pytest.raises(ValueError, match="was saved under the spec"):
        train(recipe_of("digits", "sync.spec=qsgd", "train.epochs=3"), 1, tmp_path, resume=True)


def test_a_checkpoint_that_was_cut_short_is_not_the_last(tmp_path, monkeypatch):
    recipe = recipe_of("digits")
    train(recipe, 1, tmp_path)
    before = saved(tmp_path)
    training = Training(recipe, simulated_ranks(1))
    training.step = 99

    def die(*_):
        raise OSError("no space left")

    monkeypatch.setattr(checkpoint, "write_text", die)
    with pytest.raises(OSError, match="no space"):
        save(tmp_path, training, True)
    same(saved(tmp_path), before)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    assert checkpoint.find(tmp_path, "last") is None
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for text, file in (("{", "last.json"), ("[]", "last.json"), ('{"folder": "step-5"}', "step-5/progress.json")):
        (folder / "last.json").write_text(text)
        with pytest.raises(checkpoint.Damaged, match=f"{folder / file} is damaged .*--overwrite"):
            checkpoint.find(tmp_path, "last")
    with pytest.raises(checkpoint.Damaged, match=r"rank-1\.safetensors is damaged"):
        checkpoint.load_tensors(folder / "rank-1.safetensors")


def test_a_bit_that_fell_over_is_noticed(tmp_path):
    path = tmp_path / "rank-0.safetensors"
    state = {"a": torch.ones(3), "b": torch.tensor(5), "c": torch.zeros(0), "d": torch.ones(2, 3).bfloat16().T}
    checkpoint.save_tensors(state, path)
    same(checkpoint.load_tensors(path), state)
    whole = path.read_bytes()
    for at in (1, 9, 20):
        path.write_bytes(whole[:-at] + bytes([whole[-at] ^ 16]) + whole[len(whole) - at + 1 :])
        with pytest.raises(checkpoint.Damaged, match="checksum is wrong"):
            checkpoint.load_tensors(path)


def test_a_file_without_a_checksum_is_read(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "old.safetensors")
    same(checkpoint.load_tensors(tmp_path / "old.safetensors"), {"a": torch.ones(3)})


def test_an_optimizer_survives_as_safetensors(tmp_path):
    model = torch.nn.Linear(3, 2)
    for optimizer in (torch.optim.AdamW(model.parameters()), gradwire.SGD(model.parameters(), 0.1, weight_decay=0.1)):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        rest = json.loads(json.dumps(checkpoint.save_optimizer(optimizer, tmp_path / "o.safetensors")))
        other = type(optimizer)(model.parameters(), 0.5)
        checkpoint.load_optimizer(other, tmp_path / "o.safetensors", rest)
        for p in model.parameters():
            same(other.state[p], optimizer.state[p])
        assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
