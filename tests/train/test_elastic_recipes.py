"""Recipes whose workers may die: the others go on, it is started anew, and comes back; groups resume bit for bit."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from gradwire_lab.cli.main import app
from gradwire_lab.train import checkpoint, run_modes
from gradwire_lab.train.display import Display
from gradwire_lab.train.rank_info import RankInfo
from gradwire_lab.train.record import open_folder
from gradwire_lab.train.run_folder import read
from gradwire_lab.train.run_recipe import TrainJob, run_recipe
from training_fixtures import LeavesOnce, LeftTheGroup, recipe_of, saved

RING = ("gossip.method=choco", "gossip.graph=ring", "gossip.codec=sign", "schedule.scale=graph")
ELASTIC = (*RING, "gossip.elastic=true", "gossip.timeout=10.0")


def test_a_worker_leaves_and_goes_on_at_the_steps_of_the_others(tmp_path: Path) -> None:
    """Two ranks, as threads: the second starts anew, and becomes a copy of the first."""
    recipe = recipe_of(
        "digits", *ELASTIC, "model.name=training_fixtures:LeavesOnce", "model.options={}", "train.epochs=40"
    )
    finals: dict[int, Any] = {}
    heard: list[Any] = []
    open_folder(tmp_path, recipe)

    def epochs() -> list[dict[str, Any]]:
        return [record for record in read(tmp_path) if record["event"] == "epoch"]

    def run(rank: int) -> None:
        place = RankInfo(2, (rank,), torch.device("cpu"), tmp_path / "meeting")
        try:
            finals[rank] = run_recipe(TrainJob(recipe, tmp_path), place, heard.append)
        except LeftTheGroup:
            while not any(len(record["workers"]) == 1 for record in epochs()):
                time.sleep(0.01)
            run(rank)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert LeavesOnce.back.is_set() and [finals[rank]["step"] for rank in range(2)] == [200, 200]
    assert finals[0]["workers"] == finals[1]["workers"] and min(finals[0]["workers"]) > 0.8
    assert len(epochs()) == 40 and {len(record["workers"]) for record in epochs()} == {1, 2}
    (back,) = [record for record in heard if record["event"] == "back"]
    assert back["worker"] == 1 and 10 <= back["step"] < 200
    first, second = finals[0], finals[1]
    whole = 4 * 1242  # bytes of the model
    assert first["dense"] == 200 * whole and 0 < second["dense"] <= (200 - back["step"]) * whole
    for final in (first, second):  # sign, and one letter in float32 when the edge begins anew
        assert 15 < final["payload_ratio"] < 32
        assert final["dropped"] == 0 and final["rejoined"] == 1  # it said goodbye; only the first has seen it return
    assert first["seconds"] == second["seconds"]  # it has taken over the other's clock


def test_a_worker_whose_checkpoint_was_swept_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker may have gone on without one that saves late."""
    recipe = recipe_of("digits", *ELASTIC, "train.epochs=2")
    open_folder(tmp_path, recipe)
    save = checkpoint.save_tensors

    def sweep_first(state: Any, path: Path) -> None:
        swept = path.parent / "swept" / path.name
        save(state, swept if path.name == "rank-1.safetensors" else path)

    monkeypatch.setattr(checkpoint, "save_tensors", sweep_first)

    def run(rank: int) -> Any:
        place = RankInfo(2, (rank,), torch.device("cpu"), tmp_path / "meeting")
        return run_recipe(TrainJob(recipe, tmp_path), place, lambda record: None)

    with ThreadPoolExecutor(2) as pool:
        finals = list(pool.map(run, range(2)))
    assert [final["step"] for final in finals] == [10, 10] and len(finals[0]["workers"]) == 2


def test_the_display_names_workers_that_are_restarted_and_back() -> None:
    start = {"event": "start", "world": 3, "simulated": False, "device": "cpu", "parameters": 9, "batch": 2, "steps": 9}
    start |= {"steps_per_epoch": 3, "step": 0, "method": "choco(ring) with sign"}
    console = Console(file=StringIO(), force_terminal=True, width=160)
    with Display(console) as display:
        display.show(start)
        display.show({"event": "restarted", "worker": 0, "why": "died without a word: killed by SIGKILL"})
        display.show({"event": "back", "worker": 0, "step": 5})
        display.show({**start, "step": 5})  # a second live line
    said = console.file.getvalue()
    for words in ("worker 0 died without a word: killed by SIGKILL; it is restarted", "worker 0 is back, at step 5"):
        assert words in said


@pytest.mark.study
def test_a_worker_dies_and_comes_back(tmp_path: Path) -> None:
    mortal = ("model.name=training_fixtures:DiesOnce", f"model.options={{folder='{tmp_path}'}}", "train.batch=60")
    recipe, run = recipe_of("digits", *ELASTIC, *mortal, "train.epochs=8"), tmp_path / "run"
    open_folder(run, recipe)
    heard: list[Any] = []
    final = run_modes.train_spawned(TrainJob(recipe, run), 3, heard.append)
    assert [(record["event"], record["worker"]) for record in heard if "worker" in record] == [
        ("restarted", 1),
        ("back", 1),
    ]
    assert (tmp_path / "died").exists() and (tmp_path / "back").exists()
    assert final["step"] == 160 and final["dropped"] >= 2 and final["rejoined"] >= 2  # both neighbors count it
    assert len(final["workers"]) == 3 and min(final["workers"]) > 0.8 and final["mean_model"] > 0.8
    epochs = [record for record in read(run) if record["event"] == "epoch"]
    assert len(epochs) == 8 and len(epochs[0]["workers"]) == 2


@pytest.mark.study
@pytest.mark.parametrize("overlap", [False, True])
def test_a_group_resumes_bit_for_bit(tmp_path: Path, overlap: bool) -> None:
    common = (
        *ELASTIC,
        "model.name=training_fixtures:Normed",
        "model.options={}",
        f"gossip.overlap={str(overlap).lower()}",
    )
    recipe, (whole, broken) = recipe_of("digits", *common), (tmp_path / "whole", tmp_path / "broken")
    open_folder(whole, recipe)
    through = run_modes.train_spawned(TrainJob(recipe, whole), 3, lambda record: None)
    short = recipe_of("digits", *common, "train.iterations=4")
    open_folder(broken, short)
    run_modes.train_spawned(TrainJob(short, broken), 3, lambda record: None)
    open_folder(broken, recipe)
    resumed = run_modes.train_spawned(TrainJob(recipe, broken, resume=True), 3, lambda record: None)
    for rank in range(3):
        one, other = saved(whole, f"rank-{rank}.safetensors"), saved(broken, f"rank-{rank}.safetensors")
        assert one.keys() == other.keys()
        own = [key for key in one if key != "traffic"]  # connections are made anew
        assert [key for key in own if not torch.equal(one[key], other[key])] == []
    for name in ("value", "workers", "mean_model", "consensus", "train_loss", "gamma", "step"):
        assert through[name] == resumed[name], name


def test_simulated_workers_do_not_die(tmp_path: Path) -> None:
    command = ["train", "digits", "ring8", "choco", "sign", "--set", "gossip.elastic=true"]
    for more, words in ((["--in-process", "4"], "--workers"), (["--link", "1gbit,1ms"], "gossip.elastic")):
        done = CliRunner().invoke(app, [*command, *more, "--runs", str(tmp_path)])
        assert done.exit_code == 2 and words in done.output
    with pytest.raises(ValueError, match=r"leave gossip\.across out"):
        recipe_of("digits", *ELASTIC, "gossip.across=hosts")
    with pytest.raises(ValueError, match="name one that can"):
        recipe_of("digits", "gossip.elastic=true")
