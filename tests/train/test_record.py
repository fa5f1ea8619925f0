"""Curves elsewhere: TensorBoard's events are read back, and Weights & Biases is played by a stand-in."""

import errno
import json
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from gradwire_lab.train.record import Records, _revision
from gradwire_lab.train.run_folder import read
from training_fixtures import recipe_of, train


def scalars(folder: Any) -> dict[str, dict[int, float]]:
    """What TensorBoard would draw, by name and step."""
    reason = "TensorBoard is not installed: pip install gradwire[boards]"
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason=reason)
    found = events.EventAccumulator(str(folder))
    found.Reload()
    return {name: {event.step: event.value for event in found.Scalars(name)} for name in found.Tags()["scalars"]}


def test_tensorboard_draws_what_was_recorded(tmp_path):
    train(recipe_of("digits"), 2, tmp_path)
    curves, records = scalars(tmp_path), read(tmp_path)
    drawn = {"step": ("loss", "lr", "sent"), "epoch": ("train_loss", "test_loss", "value", "wire_ratio")}
    for record in records:
        for name in drawn.get(record["event"], ()):
            assert curves[name][record["step"]] == pytest.approx(record[name], rel=1e-6), (name, record["step"])
    assert set(curves["test_loss"]) == {5, 10}
    assert set(curves["loss"]) == {1, 2, 4, 6, 8, 10}


def test_curves_of_local_steps_are_drawn_by_round_too(tmp_path):
    train(recipe_of("digits", "local.spec=diloco(H=4)"), 2, tmp_path)
    curves = scalars(tmp_path)
    assert set(curves["loss"]) == {1, 2, 4, 6, 8, 10}
    assert curves["by_round/loss"] == {1: curves["loss"][6], 2: curves["loss"][10]}  # the last one of a round


def step_record(step: int, loss: float) -> dict[str, Any]:
    return {"event": "step", "step": step, "epoch": step / 10, "loss": loss, "lr": 0.1}


def test_a_second_sitting_draws_over_what_the_first_one_lost(tmp_path):
    for begin, loss in ((1, 1.0), (4, 2.0)):  # the second goes on from a checkpoint of step 3
        with Records(tmp_path, (begin - 1) / 10, writes=True) as records:
            for step in range(begin, 7):
                records.write(step_record(step, loss))
    expected = {1: 1.0, 2: 1.0, 3: 1.0, 4: 2.0, 5: 2.0, 6: 2.0}
    with (tmp_path / "run.jsonl").open("ab") as log:
        log.write(b"3\n[]\n\xff\n{}\n")
    assert {record["step"]: record["loss"] for record in read(tmp_path)} == expected
    assert scalars(tmp_path)["loss"] == expected


def test_a_sitting_that_nothing_is_left_of_is_forgotten(tmp_path):
    for sitting, step in enumerate((0, 3, 3)):  # the second ended before its first checkpoint
        with Records(tmp_path, step / 10, writes=True) as records:
            records.write({"event": "start", "step": step, "steps_per_epoch": 10, "sitting": sitting})
            for later in range(step + 1, step + 4):
                records.write(step_record(later, 1.0))
    assert [record["sitting"] for record in read(tmp_path) if record["event"] == "start"] == [0, 2]


class Wandb(SimpleNamespace):
    """Stands in for the module, and for the run that its init returns."""

    def __init__(self) -> None:
        super().__init__(begun=[], logged=[], ended=[])

    def init(self, **options: Any) -> "Wandb":
        self.begun.append(options)
        return self

    def log(self, curves: dict[str, float], step: int) -> None:
        self.logged.append((step, json.loads(json.dumps(curves))))

    def finish(self, exit_code: int) -> None:
        self.ended.append(exit_code)


@pytest.fixture
def wandb(monkeypatch) -> Wandb:
    played = Wandb()
    monkeypatch.setitem(sys.modules, "wandb", played)
    monkeypatch.setenv("WANDB_PROJECT", "thin-wires")
    monkeypatch.setenv("WANDB_MODE", "offline")  # in case it is the real one after all
    return played


def test_weights_and_biases_hear_every_step_and_epoch(tmp_path, wandb):
    train(recipe_of("digits"), 2, tmp_path / "run")
    (begun,) = wandb.begun
    assert (begun["project"], begun["name"], begun["resume"]) == ("thin-wires", "run", "allow")
    told = [record for record in read(tmp_path / "run") if record["event"] in ("step", "epoch")]
    assert [step for step, _ in wandb.logged] == [record["step"] for record in told]
    for (_, curves), record in zip(wandb.logged, told, strict=True):
        assert curves and all(record[name] == value for name, value in curves.items())
    assert "test_loss" in wandb.logged[-1][1] and "loss" in wandb.logged[0][1]
    assert wandb.ended == [0]


def test_sittings_of_a_run_are_one_run_there(tmp_path, wandb):
    for epoch in (0.0, 0.2, 0.0):  # begun, gone on with, and begun again
        with Records(tmp_path, epoch, writes=True) as records:
            records.write(step_record(2, 1.0))
    first, second, third = (begun["id"] for begun in wandb.begun)
    assert first == second != third
    with pytest.raises(ZeroDivisionError), Records(tmp_path, 0.2, writes=True):
        _ = 1 / 0
    assert wandb.ended == [0, 0, 0, 1]


def test_ranks_that_do_not_write_tell_nobody(tmp_path, wandb):
    with Records(tmp_path, 0.0, writes=False):
        pass
    assert not wandb.begun and not list(tmp_path.iterdir())


def test_without_a_project_or_without_the_module(tmp_path, wandb, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match="WANDB_PROJECT is set, but wandb is not installed: pip install wandb"):
        Records(tmp_path, 0.0, writes=True)
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv("WANDB_PROJECT")
    with Records(tmp_path, 0.0, writes=True):
        assert not wandb.begun


def test_a_full_disk_in_the_thread_of_tensorboard_is_raised_and_not_printed(tmp_path, capsys):
    """Its thread printed a traceback, and the error named no file."""

    class FullBoard:
        def add_scalar(self, *point):
            raise OSError(errno.ENOSPC, "No space left on device")

        def close(self):
            pass

    with Records(tmp_path, 0.0, writes=True) as records:
        records._board = FullBoard()
        with pytest.raises(OSError, match=r"events\.out"):
            records.write({"event": "step", "step": 1, "loss": 1.0})
    if "torch.utils.tensorboard" in sys.modules:
        thread = type("Writer", (threading.Thread,), {"__module__": "tensorboard.summary"})(
            target=FullBoard().add_scalar
        )
        thread.start()
        thread.join()
        assert "Traceback" not in capsys.readouterr().err


def test_the_revision_is_read_without_a_lock(tmp_path):
    """A git that holds the lock of the index, and is killed, leaves a repository that takes no commit."""

    def git(*words: str) -> str:
        who = ("-c", "user.name=A", "-c", "user.email=a@example.org")
        return subprocess.run(["git", "-C", tmp_path, *who, *words], check=True, capture_output=True, text=True).stdout

    file, index = tmp_path / "a.py", tmp_path / ".git" / "index"
    git("init", "-q")
    file.write_text("1")
    git("add", "a.py")
    git("commit", "-qm", "one")
    os.utime(file, (1, 1))  # what makes git refresh the index, if it may
    before = index.read_bytes()
    assert _revision(tmp_path) == git("rev-parse", "HEAD").strip()
    file.write_text("2")
    assert str(_revision(tmp_path)).endswith("-dirty")
    assert index.read_bytes() == before
    assert _revision(tmp_path / "nowhere") is None
