"""The loop end to end: simulated workers, and real gloo processes that must compute the same."""

import json

import pytest
import torch

from gradwire_lab.train import run_modes
from gradwire_lab.train.loop import Training
from gradwire_lab.train.rank_info import simulated_ranks
from gradwire_lab.train.recipe_files import load
from gradwire_lab.train.record import open_folder
from gradwire_lab.train.run_folder import read
from gradwire_lab.train.run_recipe import TrainJob, evaluate
from training_fixtures import recipe_of, saved, train


def test_a_run_leaves_its_records_behind(tmp_path):
    heard = []
    final = train(recipe_of("digits"), 2, tmp_path, heard=heard)
    records = read(tmp_path)
    assert [record["event"] for record in records] == [record["event"] for record in heard]
    start, *_, last_epoch, end = records
    assert (start["event"], start["world"], start["recipe"]) == ("start", 2, tmp_path.name)
    assert start["simulated"] is start["virtual"] is True, "by both names for one release"
    assert [record["step"] for record in records if record["event"] == "step"] == [1, 2, 4, 6, 8, 10]
    assert (last_epoch["epoch"], last_epoch["step"], last_epoch["metric"]) == (2, 10, "top1")
    assert end == json.loads(json.dumps(final))
    assert end["dense"] == 10 * 4 * start["parameters"]
    assert 0 < end["payload"] < end["dense"] / 20
    assert sum(payload for payload, _ in end["rules"].values()) == end["payload"]
    assert set(end["layers"]) == set(saved(tmp_path))
    assert len((tmp_path / "results.csv").read_text().splitlines()) == 3
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["torch"] == torch.__version__


def test_training_teaches(tmp_path):
    recipe = recipe_of("digits", "train.batch=60", "train.epochs=5", "model.options={width=16}", "sync.spec=dense")
    assert train(recipe, 2, tmp_path)["value"] > 0.9


@pytest.mark.filterwarnings("ignore::gradwire.OptimizerWarning")  # sign before AdamW
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        (
            "digits",
            ("train.precision=bf16", "optimizer.clip=1.0", "train.label_smoothing=0.1", "sync.granularity=model"),
        ),
        ("digits", ("train.precision=fp16", "optimizer.clip=1.0", "sync.spec=topk(0.05)")),
        ("digits", ("train.accumulate=2", "train.batch=120", "sync.spec=dgc(0.01)", "optimizer.weight_decay=1e-4")),
        ("digits", ("data.crop=1", "data.flip=true", "data.partition=sorted", "sync.spec=qsgd", "train.buffers=first")),
        ("pydoc-lstm", ("sync.spec=topk(0.01)", "schedule.kind=plateau")),
        ("pydoc-gpt", ("sync.spec=sign",)),
        ("pydoc-gpt", ("sync.spec=dgc_adam(0.1, start=2)",)),
        ("pydoc-gpt", ("train.precision=fp16", "sync.spec=onebit_adam(start=3, per=16)", "train.iterations=6")),
    ],
)
def test_all_kinds_of_recipes_train(tmp_path, name, overrides):
    final = train(recipe_of(name, *overrides), 2, tmp_path)
    assert final["skipped"] == 0
    assert final["test_loss"] < 6
    assert final["metric"] == ("top1" if name == "digits" else "perplexity")


def test_accumulated_passes_equal_one_large_one():
    weights = []
    for accumulate, batch in ((1, 48), (4, 12)):
        overrides = (
            f"train.accumulate={accumulate}",
            f"train.batch={batch}",
            "sync.spec=dense",
            "train.batch_per=worker",
        )
        training = Training(recipe_of("digits", *overrides), simulated_ranks(1))
        training._one_step(next(training.loader.epoch(0)))
        weights.append(torch.cat([p.detach().flatten() for p in training.model.parameters()]))
    torch.testing.assert_close(*weights)


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_passes_tell_the_variance_test_how_much_they_differ(clip):
    base = ("sync.spec=variance", "train.accumulate=3", "train.batch=40", "train.batch_per=worker")
    training = Training(recipe_of("digits", *base, f"optimizer.local_clip={clip}"), simulated_ranks(1))
    batch = next(training.loader.epoch(0))
    parts = []
    for i in range(3):
        training.model.zero_grad()
        images, labels = batch.inputs[40 * i : 40 * (i + 1)], batch.targets[40 * i : 40 * (i + 1)]
        torch.nn.functional.cross_entropy(training.model(images), labels).backward()
        parts.append({name: p.grad / 3 for name, p in training.model.named_parameters()})
    seen = {}
    training.strategy.workers.wire.observe = seen.update
    training.strategy.passes(batch, 0)
    norm = torch.nn.utils.get_total_norm([sum(part[name] for part in parts) for name in parts[0]])
    shrunk = min(1.0, clip / norm) ** 2 if clip else 1.0  # as the gradients are that they are held against
    for name, moment in seen.items():
        expected = shrunk * sum(part[name].square() for part in parts)
        torch.testing.assert_close(moment, expected, rtol=1e-3, atol=1e-10)
    assert seen.keys() == parts[0].keys()


def test_a_scaler_asks_simulated_workers_beforehand_where_nothing_is_rolled_back():
    overrides = ("train.precision=fp16", "sync.spec=topk(0.05)", "sync.rollback=false")
    training = Training(recipe_of("digits", *overrides), simulated_ranks(2))
    batches = training.loader.epoch(0)
    for scale in (2.0**8, 2.0**40, 2.0**8):  # the second is too much for 16 bits
        training.strategy.scaler.load_state_dict({**training.strategy.scaler.state_dict(), "scale": scale})
        training._one_step(next(batches))
    assert training.strategy.workers.wire.skipped == 1
    assert all(bool(torch.isfinite(p).all()) for p in training.model.parameters())


def test_a_delayed_mean_waits_for_a_step_that_the_scaler_takes():
    overrides = ("train.precision=fp16", "sync.spec=int8", "sync.exchange=delayed")
    training = Training(recipe_of("digits", *overrides), simulated_ranks(2))
    batches, means = training.loader.epoch(0), []
    for scale in (2.0**8, 2.0**40):  # the second is too much for 16 bits
        training.strategy.scaler.load_state_dict({**training.strategy.scaler.state_dict(), "scale": scale})
        training._one_step(next(batches))
        updates = training.strategy.workers.wire.engine.delayed_updates
        means.append(torch.cat([x.flatten() for x in updates.values()]))
    assert means[0].any() and torch.equal(*means)


def test_images_grow_while_a_training_goes_on():
    growing = ("model.name=training_fixtures:Pooled", "data.sizes=[[0, 4], [1, 8]]")
    training = Training(recipe_of("digits", *growing), simulated_ranks(2))
    training.run(lambda record: None, lambda training, best: None)
    assert training.model.sides == [4] * 10 + [8] * 10  # two workers, five steps an epoch
    with pytest.raises(ValueError, match="the model cnn cannot take the images of 6x6 pixels"):
        Training(recipe_of("digits", "data.sizes=[[0, 6], [1, 8]]"), simulated_ranks(2))
    with pytest.raises(ValueError, match="pydoc has no images"):
        Training(recipe_of("pydoc-gpt", "data.sizes=[[0, 8]]"), simulated_ranks(2))


def own_recipe(*overrides):
    return recipe_of("digits", "model.name=training_fixtures:Normed", *overrides)


def test_every_worker_keeps_its_own_statistics(tmp_path):
    training = Training(own_recipe(), simulated_ranks(2))
    training._one_step(next(training.loader.epoch(0)))
    first, second = (own["2.running_mean"] for own in training.strategy.workers.buffers)
    assert not torch.equal(first, second)
    torch.testing.assert_close(
        training.strategy.workers.evaluation_buffers("average")["2.running_mean"], (first + second) / 2
    )
    assert torch.equal(training.strategy.workers.evaluation_buffers("first")["2.running_mean"], first)
    assert training.strategy.workers.buffers[1]["2.num_batches_tracked"] == 1


def test_a_model_brings_its_regime(tmp_path):
    heard = []
    train(own_recipe(), 2, tmp_path, heard=heard)
    assert {record["lr"] for record in heard if record["event"] == "step"} == {0.1, 0.01}
    training = Training(own_recipe("optimizer.momentum=0.5", "sync.spec=dgc(0.1)"), simulated_ranks(1))
    assert training.recipe.optimizer.lr == 0.1 and "momentum=0.5" in training.strategy.workers.wire.spec


# -- real processes ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("own", ("sync.spec=topk(0.05)", "sync.bundle=fp32")),
        ("pydoc-lstm", ("sync.spec=dgc(0.05)", "sync.bundle=fp32")),
        ("pydoc-gpt", ("sync.spec=onebit_adam(start=3, alone=1, per=16)", "sync.bundle=fp32", "train.iterations=6")),
    ],
)
def test_simulated_workers_equal_real_ones(tmp_path, name, overrides):
    recipe = own_recipe(*overrides) if name == "own" else recipe_of(name, *overrides)
    real, simulated = tmp_path / "real", tmp_path / "simulated"
    open_folder(real, recipe)
    theirs = run_modes.train_spawned(TrainJob(recipe, real), 4, lambda record: None)
    ours = train(recipe, 4, simulated)
    assert (ours["sent"], ours["payload"]) == (theirs["sent"], theirs["payload"])
    assert ours["value"] == pytest.approx(theirs["value"], rel=1e-3)
    for key, weight in saved(real).items():
        torch.testing.assert_close(saved(simulated)[key], weight, rtol=1e-4, atol=1e-5, msg=key)
    read_back = load(real / "recipe.toml", "training_fixtures:Normed" if name == "own" else "")
    score = evaluate(real, read_back, "last", "test", "cpu")
    assert score.loss == pytest.approx(theirs["test_loss"], rel=1e-6)
