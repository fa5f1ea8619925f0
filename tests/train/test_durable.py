"""A power cut, a changed byte or a second process leaves a checkpoint that is right, or a sentence."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gradwire.integrations import checksums
from gradwire_lab.cli.main import app
from gradwire_lab.train import checkpoint
from gradwire_lab.train.run_folder import locked
from training_fixtures import recipe_of, train


class Disk:
    """What a power cut leaves of a folder: contents that were synced, under names that were synced.

    Renames and syncs are observed; each is a moment at which the power may fail.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self.contents: dict[int, bytes] = {}  # of files, by inode
        self.names: dict[Path, dict[str, int]] = {}  # of folders: name to inode
        self.moments: list[tuple[dict[int, bytes], dict[Path, dict[str, int]]]] = []
        self._fsync = os.fsync
        monkeypatch.setattr(os, "fsync", self.sync)

    def sync(self, handle: int) -> None:
        self._fsync(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_dir():
            self.names = {**self.names, path: {each.name: each.stat().st_ino for each in path.iterdir()}}
        else:
            self.contents = {**self.contents, path.stat().st_ino: path.read_bytes()}
        self.moments.append((self.contents, self.names))

    def leave(self, moment: int, to: Path) -> None:
        """Write what is left of the root: a file that was not synced is empty, a folder has the names synced last."""
        shutil.rmtree(to, ignore_errors=True)
        self._leave(*self.moments[moment], self.root, to)

    def _leave(self, contents: dict[int, bytes], names: dict[Path, dict[str, int]], folder: Path, to: Path) -> None:
        to.mkdir()
        for name, inode in names.get(folder, {}).items():
            if folder / name in names:
                self._leave(contents, names, folder / name, to / name)
            else:
                (to / name).write_bytes(contents.get(inode, b""))


def test_after_any_power_cut_the_last_checkpoint_is_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run, left = tmp_path / "run", tmp_path / "left"
    run.mkdir()
    disk = Disk(run, monkeypatch)
    train(recipe_of("digits", "sync.spec=topk(0.05)", "train.save_every=3"), 2, run)
    steps = []
    for moment in range(len(disk.moments)):
        disk.leave(moment, left)
        if (last := checkpoint.find(left, "last")) is not None:
            steps.append(checkpoint.progress_of(last)["step"])
            for path in (last / "model.safetensors", last / "optimizer.safetensors", last / "rank-1.safetensors"):
                assert checkpoint.load_tensors(path) or path.name.startswith("optimizer")
    assert steps == sorted(steps) and len(set(steps)) > 2
    assert steps[-1] == checkpoint.progress_of(checkpoint.find(run, "last"))["step"]


def test_every_changed_byte_of_a_checkpoint_is_noticed(tmp_path):
    train(recipe_of("digits", "sync.spec=topk(0.05)"), 1, tmp_path)
    last = checkpoint.find(tmp_path, "last")
    files = ((tmp_path / "checkpoints" / "last.json", lambda: checkpoint.find(tmp_path, "last")),)
    files = (*files, (last / "progress.json", lambda: checkpoint.progress_of(last)))
    for path, load in files:
        whole, right = path.read_bytes(), load()
        wrong = []
        for at in range(len(whole)):
            for byte in {whole[at] ^ 1, ord("1")} - {whole[at]}:
                path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
                try:
                    wrong += [at] * (load() != right)
                except checkpoint.Damaged:
                    continue
        path.write_bytes(whole)
        assert not wrong, f"{path.name} was read with other contents"


def test_a_checkpoint_without_checksums_in_json_is_read(tmp_path):
    recipe = recipe_of("digits", "sync.spec=topk(0.05)")
    train(recipe, 1, tmp_path)
    last = checkpoint.find(tmp_path, "last")
    for path in (tmp_path / "checkpoints" / "last.json", last / "progress.json"):
        content = json.loads(path.read_text())
        path.write_text(json.dumps({name: content[name] for name in content if name not in ("format", "crc32")}))
    assert checkpoint.progress_of(checkpoint.find(tmp_path, "last"))["world"] == 1


def test_a_damaged_checksum_of_tensors_is_noticed(tmp_path):
    path = tmp_path / "wire-0.safetensors"
    checksums.write({"a": torch.ones(3)}, path)
    path.write_bytes(path.read_bytes().replace(b'"crc32"', b'"crc33"'))
    with pytest.raises(checksums.Unreadable):
        checksums.read(path)


HOLD = """
import sys, time
from pathlib import Path
from gradwire_lab.train.run_folder import locked
with locked(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(1000)
"""


def test_a_run_folder_has_one_process_at_a_time(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
        words = ["train", "digits", "--in-process", "1", "--folder", str(tmp_path), "--set", "train.iterations=1"]
        for more in ([], ["--resume"], ["--overwrite"]):
            refused = CliRunner().invoke(app, [*words, *more])
            assert refused.exit_code == 2 and f"process {holder.pid}" in refused.stderr
        holder.kill()
    with locked(tmp_path):  # the lock went with its holder
        pass


def test_a_stray_file_among_checkpoints_is_left_alone(tmp_path):
    (tmp_path / "checkpoints").mkdir(parents=True)
    stray = tmp_path / "checkpoints" / "step-999"
    stray.write_text("notes")
    train(recipe_of("digits"), 1, tmp_path, resume=True)
    assert stray.read_text() == "notes" and checkpoint.find(tmp_path, "last") is not None


def test_a_checkpoint_that_workers_ahead_have_begun_is_left(tmp_path):
    """Workers far from the first one on a graph may be a step ahead, and save after every step."""
    four, eight, _ = (checkpoint.open_folder(tmp_path, step) for step in (4, 8, 9))
    for folder in (four, eight):
        checkpoint.write_json(folder / checkpoint.PROGRESS, {"world": 4})
        checkpoint.publish(folder, best=True)
    assert {path.name for path in (tmp_path / "checkpoints").glob("step-*")} == {"step-8", "step-9"}


def test_a_whole_checkpoint_of_a_later_step_is_removed(tmp_path):
    """A run that is continued with more workers goes back to a smaller step number."""
    for step in (20, 8):
        folder = checkpoint.open_folder(tmp_path, step)
        checkpoint.write_json(folder / checkpoint.PROGRESS, {"world": 4})
        checkpoint.publish(folder, best=True)
    assert [path.name for path in (tmp_path / "checkpoints").glob("step-*")] == ["step-8"]
