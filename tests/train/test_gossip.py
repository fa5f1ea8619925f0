"""Recipes whose workers gossip: alone or in processes, resumed, evaluated, reported."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from gradwire_lab.cli.main import app
from gradwire_lab.cli.plan import gossip_rows
from gradwire_lab.report.charts import figures
from gradwire_lab.report.load import load
from gradwire_lab.report.run_groups import tasks
from gradwire_lab.train import recipe_files, run_modes
from gradwire_lab.train.gossip_workers import nodes
from gradwire_lab.train.loop import Training
from gradwire_lab.train.models import build
from gradwire_lab.train.rank_info import simulated_ranks
from gradwire_lab.train.record import open_folder
from gradwire_lab.train.run_folder import read
from gradwire_lab.train.run_recipe import TrainJob, evaluate, run_recipe
from gradwire_lab.train.schedule import scale_of
from training_fixtures import DIGITS, recipe_of, saved, train

RING = ("gossip.method=choco", "gossip.graph=ring", "gossip.codec=sign", "schedule.scale=graph", "optimizer.lr=0.05")
KINDS = [
    ("digits", ("gossip.codec=topk(0.1) | sign", "model.name=training_fixtures:Normed", "model.options={}")),
    ("digits", ("gossip.codec=qsgd(levels=7, biased=True)", "gossip.overlap=true", "optimizer.weight_decay=1e-3")),
    ("digits", ("gossip.method=dcd", "gossip.codec=qsgd", "optimizer.name=adamw", "optimizer.lr=0.002")),
    ("digits", ("gossip.method=powergossip", "gossip.codec=", "data.partition=sorted", "train.accumulate=2")),
    ("pydoc-lstm", ("optimizer.local_clip=0.5",)),
    ("digits", ("gossip.across=[[0, 1], [2, 3]]", "gossip.granularity=model")),
]


class Stop(Exception):
    pass


def stop_at(step: int) -> Callable[[dict[str, Any]], None]:
    def listen(record: dict[str, Any]) -> None:
        if record["event"] == "step" and record["step"] >= step:
            raise Stop

    return listen


def timeless(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if "seconds" not in name}


@pytest.mark.parametrize(("name", "overrides"), KINDS)
def test_a_resumed_run_equals_one_that_was_not_stopped(tmp_path: Path, name: str, overrides: tuple[str, ...]) -> None:
    """In mid-epoch too, with copies, residuals, gamma, momenta, statistics and recurrent states."""
    recipe = recipe_of(name, *RING, *overrides, "train.log_every=1", "train.save_every=3")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    through = train(recipe, 4, whole)
    open_folder(broken, recipe)
    with pytest.raises(Stop):
        run_recipe(TrainJob(recipe, broken), simulated_ranks(4), stop_at(4))
    resumed = train(recipe, 4, broken, resume=True)
    for file in ("model.safetensors", "rank-0.safetensors", "rank-3.safetensors"):
        one, other = saved(whole, file), saved(broken, file)
        assert one.keys() == other.keys()
        assert [key for key in one if not torch.equal(one[key], other[key])] == []
    assert timeless(through) == timeless(resumed)


@pytest.mark.parametrize("iterations", [1, 3])
def test_records_of_local_steps_count_the_bytes_of_one_message(tmp_path: Path, iterations: int) -> None:
    method = ("gossip.method=powergossip", "gossip.codec=", f"gossip.options.iterations={iterations}")
    recipe = recipe_of("digits", *RING, *method, "gossip.H=2", "train.iterations=5")
    final = train(recipe, 3, tmp_path)
    dense = 4 * saved(tmp_path, "rank-0.safetensors")["row"].numel()
    assert (final["payload"], final["dense"]) == (final["sent"] / 2, 5 * dense)


def test_a_training_that_diverges_at_local_steps_says_so(tmp_path: Path) -> None:
    recipe = recipe_of("digits", *RING, "gossip.H=50", "optimizer.lr=1e30", "train.save_every=3")
    final = train(recipe, 2, tmp_path)
    assert "no longer finite" in final["diverged"] and not (tmp_path / "rank-0.safetensors").exists()


def test_processes_do_as_simulated_workers_do(tmp_path: Path) -> None:
    """Bit for bit, if simulated workers pass in turn; so processes may go on where simulated workers stopped."""
    common = (*RING, "model.name=training_fixtures:Normed", "model.options={}", "gossip.passes=sequential")
    recipe = recipe_of("digits", *common)
    here, there = tmp_path / "here", tmp_path / "there"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        final = train(recipe, 3, here)
        train(recipe_of("digits", *common, "train.iterations=5"), 3, there)
    finally:
        torch.set_num_threads(threads)
    open_folder(there, recipe)
    other = run_modes.train_spawned(TrainJob(recipe, there, resume=True), 3, lambda record: None)
    for rank in range(3):
        mine, theirs = saved(here, f"rank-{rank}.safetensors"), saved(there, f"rank-{rank}.safetensors")
        assert mine.keys() == theirs.keys()
        skip = {"loss"}  # a real rank knows its own alone
        assert [key for key in mine if key not in skip and not torch.equal(mine[key], theirs[key])] == []
    for name in ("sent", "received", "payload_ratio", "gamma", "workers", "step"):
        assert final[name] == other[name], name
    for name in ("value", "mean_model", "train_loss", "consensus"):
        assert final[name] == pytest.approx(other[name], rel=1e-5), name


@pytest.mark.parametrize("stopped", [False, pytest.param(True, marks=pytest.mark.study)])
def test_workers_of_a_node_are_one(tmp_path: Path, stopped: bool) -> None:
    """In processes, each of which gossips some layers, as in one; and processes go on where they stopped."""
    common = (*RING, "gossip.options.gamma=0.4", "gossip.passes=sequential", "gossip.across=[[0, 1], [2, 3]]")
    recipe, (here, there) = recipe_of("digits", *common), (tmp_path / "here", tmp_path / "there")
    assert scale_of(recipe, 4, 240, workers_per_node=2) == 4.0  # two nodes that hear each other, of two workers each
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        final = train(recipe, 4, here)
    finally:
        torch.set_num_threads(threads)
    if stopped:
        broken = recipe_of("digits", *common, "train.iterations=5")
        open_folder(there, broken)
        run_modes.train_spawned(TrainJob(broken, there), 4, lambda record: None)
    open_folder(there, recipe)
    other = run_modes.train_spawned(TrainJob(recipe, there, resume=stopped), 4, lambda record: None)
    for rank in range(4):
        mine, theirs = saved(here, f"rank-{rank}.safetensors"), saved(there, f"rank-{rank}.safetensors")
        own = [key for key in mine if key not in ("loss", "traffic") and not key.startswith("gossip/")]
        assert [key for key in own if not torch.equal(mine[key], theirs[key])] == []
    rows = [saved(here, f"rank-{rank}.safetensors")["row"] for rank in range(4)]
    assert torch.equal(rows[0], rows[1]) and torch.equal(rows[2], rows[3]) and not torch.equal(rows[1], rows[2])
    assert other["hosts"] == 2 and other["sent_inside"] > 5 * other["sent"] > 0
    assert other["payload_ratio"] == pytest.approx(final["payload_ratio"], rel=0.2)  # of a share of the layers
    assert other["consensus"] == pytest.approx(final["consensus"], rel=1e-5)


def test_together_and_in_turn_are_the_same_training(tmp_path: Path) -> None:
    finals = []
    for way in ("together", "sequential"):
        recipe = recipe_of("digits", *RING, f"gossip.passes={way}", "gossip.codec=fp32")
        finals.append(train(recipe, 4, tmp_path / way))
    assert finals[0]["train_loss"] == pytest.approx(finals[1]["train_loss"], rel=1e-3)


def test_every_worker_and_the_mean_model_are_judged(tmp_path: Path) -> None:
    recipe = recipe_of("digits", *RING, "train.epochs=8", "train.batch=80")
    final = train(recipe, 4, tmp_path)
    assert len(final["workers"]) == 4 and min(final["workers"]) > 0.8
    assert final["value"] == pytest.approx(sum(final["workers"]) / 4)
    assert final["mean_model"] > 0.8 and final["consensus"] > 0
    score = evaluate(
        tmp_path, recipe_files.load(tmp_path / "recipe.toml"), "last", "test", "cpu"
    )  # what is saved is the mean model
    assert score.value == pytest.approx(final["mean_model"])
    start = read(tmp_path)[0]
    assert start["spec"] == "choco(ring) with sign" and "ring on 4 ranks" in start["method"]


def test_the_report_draws_the_distance(tmp_path: Path) -> None:
    pytest.importorskip("altair")
    train(recipe_of("digits", *RING), 4, tmp_path / "digits-0")
    drawn = {figure.name for figure in figures(tasks([load(tmp_path / "digits-0")])[0])}
    assert {"consensus-by-epoch", "metric-by-epoch"} <= drawn


def test_a_run_that_diverges_says_so(tmp_path: Path) -> None:
    recipe = recipe_of("digits", *RING, "gossip.method=dcd", "gossip.codec=qsgd(levels=1)", "optimizer.lr=1e30")
    final = train(recipe, 4, tmp_path)
    assert "no longer finite" in final["diverged"] and final["value"] == 0.1
    assert read(tmp_path)[-1]["event"] == "final"


def test_another_number_of_workers_is_refused(tmp_path: Path) -> None:
    recipe = recipe_of("digits", *RING)
    train(recipe, 4, tmp_path)
    with pytest.raises(ValueError, match=r"with 4$"):
        train(recipe_of("digits", *RING, "train.epochs=3"), 3, tmp_path, resume=True)


def test_fragments_make_a_gossiping_recipe() -> None:
    recipe = recipe_files.resolve(["cifar10-resnet20", "ring8", "choco", "sign"])
    assert (recipe.gossip.method, recipe.gossip.graph, recipe.gossip.codec) == ("choco", "ring", "sign")
    assert recipe.train.workers == 8
    assert scale_of(recipe, 8, 128) == 3.0  # itself and two neighbors
    published = recipe_files.resolve(["cifar10-resnet20-ring8", "dpsgd"])
    assert published.optimizer.lr * scale_of(published, 8, 128) == pytest.approx(0.6)
    social = recipe_files.resolve(["wikitext2-lstm650-social32", "sign"])
    assert social.train.workers == 32 and social.gossip.graph == "social"
    assert recipe_files.resolve(["digits", "ring8", "sgp"]).gossip.method == "sgp"
    assert scale_of(recipe_files.resolve(["digits", "ring8", "centralized"]), 8, 60) == 8.0


def test_the_language_model_of_32_acquaintances_trains(tmp_path: Path) -> None:
    """The recipe of WikiText-2, with fewer words and a smaller network."""
    (tmp_path / "wikitext-2").mkdir()
    for split, sentences in (("train", 900), ("valid", 40), ("test", 40)):
        text = " one two three four five <unk> \n" * sentences
        (tmp_path / "wikitext-2" / f"wiki.{split}.tokens").write_text(text)
    small = ["model.options={hidden=6, layers=3, dropout=0.0, tied=true}", "train.batch=4", "data.length=8"]
    recipe = recipe_files.resolve(
        ["wikitext2-lstm650-social32", "sign"],
        [*small, f"data.root={tmp_path}", "data.options.strict=false", "train.iterations=5", "data.columns=2"],
    )
    final = train(recipe, 32, tmp_path / "run")
    assert final["step"] == 5 and len(final["workers"]) == 32 and final["metric"] == "perplexity"
    assert final["value"] < 8 and final["consensus"] > 0 and 0 < final["gamma"] <= 1  # of seven words


@pytest.mark.parametrize(
    ("sets", "sentence"),
    [
        (["gossip.method=choc"], "choco"),
        (["gossip.graph=rong"], "ring"),
        (["gossip.codec=sing"], "sign"),
        (["gossip.options.gamma=2"], "consensus step in"),
        (["train.precision=fp16"], "bf16"),
        (["schedule.scale=linear"], "schedule.scale = 'graph'"),
        (["gossip.passes=both"], "sequential"),
        (["gossip.across=nodes"], "gossip.across"),
    ],
)
def test_what_cannot_be_is_a_sentence(sets: list[str], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        recipe_files.resolve(["digits", "ring8"], sets)


def test_the_plan_knows_the_bytes(tmp_path: Path) -> None:
    """What `gradwire plan` says of a message is what a training sends."""
    done = CliRunner().invoke(app, ["plan", "cifar10-resnet20-ring8", "sign"])
    assert done.exit_code == 0, done.output
    for words in ("choco(ring)", "spectral gap 0.1953, 2 neighbors", "0.1 x 6", "33,992 bytes", "gamma", "269,722"):
        assert words in done.output, words
    recipe = recipe_of("digits", *RING, "gossip.graph=star", "train.epochs=1")
    model = build(recipe.model.name, recipe.model.options, {"classes": 10, "channels": 1, "size": 8})
    told = dict(gossip_rows(recipe, model, 4))["sent"]
    final = train(recipe, 4, tmp_path)  # the first worker is the hub, and has three neighbors
    assert f"{int(final['sent'] / final['step']):,} bytes" in told


@pytest.mark.parametrize("name", ["sgp", "powergossip", "centralized"])
def test_the_plan_knows_the_bytes_of_other_methods(tmp_path: Path, name: str) -> None:
    recipe = recipe_of("digits", *RING, "gossip.codec=", f"gossip.method={name}", "train.epochs=1")
    model = build(recipe.model.name, recipe.model.options, {"classes": 10, "channels": 1, "size": 8})
    told = dict(gossip_rows(recipe, model, 4))["sent"]
    final = train(recipe, 4, tmp_path)
    most = int(told.removeprefix("at most ").split()[0].replace(",", ""))
    least = 0.5 if name == "powergossip" else 0.999  # rows and columns of a matrix take turns
    assert least * most < final["sent"] / final["step"] <= most + 1


def test_what_a_graph_cannot_be_is_a_sentence_too() -> None:
    recipe = recipe_of("digits", *RING, "gossip.across=[[0, 1], [2]]")
    with pytest.raises(ValueError, match="not equally large"):
        Training(recipe, simulated_ranks(3))
    with pytest.raises(ValueError, match="would be a ring"):
        Training(recipe_files.resolve(["digits", "torus16"], [*DIGITS, "train.workers=7"]), simulated_ranks(7))
    with pytest.raises(ValueError, match="recurrent"):
        Training(recipe_of("pydoc-lstm", *RING, "gossip.passes=together"), simulated_ranks(4))


def test_simulated_workers_have_no_hosts() -> None:
    with pytest.raises(ValueError, match="one node of all 4 workers"):
        nodes(4, "hosts")
    assert nodes(4, [[0, 2], [1, 3]]) == ((0, 2), (1, 3))
