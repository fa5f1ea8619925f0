"""Power cuts: what a disk may hold at any moment of a training is a whole checkpoint, and training goes on from it.

Of a file that was not synced, a disk may hold nothing, a beginning, or zeros. Of a folder that was not synced, it may
hold the names of before or those of now. Every sync is a moment at which the power may fail.
"""

import os
import random
import shutil
import tempfile
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from faults.campaign import Campaign
from gradwire_lab.train import checkpoint
from training_fixtures import recipe_of, saved, train

Names = dict[Path, dict[str, int]]  # of folders: name to inode
TASKS = {
    "top-k": (("digits", "sync.spec=topk(0.05)", "train.save_every=3"), 2),
    "DGC": (("digits", "sync.spec=dgc(0.05)", "train.save_every=4"), 2),
    "gossip": (
        ("digits", "gossip.method=choco", "gossip.options={gamma=0.5}", "gossip.codec=sign", "train.save_every=3"),
        3,
    ),
}


class Moment(NamedTuple):
    """What is surely on the disk, and what the programs see."""

    synced_bytes: dict[int, bytes]
    synced_names: Names
    seen_bytes: dict[int, bytes]
    seen_names: Names


class Disk:
    """Observes the syncs below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.moments: list[Moment] = []
        self._bytes: dict[int, bytes] = {}
        self._names: Names = {}

    @contextmanager
    def observed(self) -> Iterator[None]:
        fsync = os.fsync

        def sync(handle: int) -> None:
            fsync(handle)
            self._note(Path(os.readlink(f"/proc/self/fd/{handle}")))

        os.fsync = sync
        try:
            yield
        finally:
            os.fsync = fsync

    def _note(self, path: Path) -> None:
        if path.is_dir():
            self._names = {**self._names, path: {each.name: each.stat().st_ino for each in path.iterdir()}}
        else:
            self._bytes = {**self._bytes, path.stat().st_ino: path.read_bytes()}
        folders = [self.root, *(each for each in self.root.rglob("*") if each.is_dir())]
        names = {one: {each.name: each.stat().st_ino for each in one.iterdir()} for one in folders}
        files = {each.stat().st_ino: each.read_bytes() for each in self.root.rglob("*") if each.is_file()}
        self.moments.append(Moment(self._bytes, self._names, files, names))

    def leave(self, moment: Moment, to: Path, draw: random.Random) -> None:
        """Write what is left after a power cut at a moment."""
        shutil.rmtree(to, ignore_errors=True)
        to.mkdir()
        late = draw.random() < 0.5  # whether renames reached the disk before their folder was synced
        self._leave(moment, self.root, to, draw, late)

    def _leave(self, moment: Moment, folder: Path, to: Path, draw: random.Random, late: bool) -> None:
        synced, seen = moment.synced_names.get(folder, {}), moment.seen_names.get(folder, {})
        for name, inode in (seen if late else synced).items():
            if folder / name in moment.seen_names:
                (to / name).mkdir()
                self._leave(moment, folder / name, to / name, draw, late)
            else:
                (to / name).write_bytes(_content(moment, inode, draw))


def _content(moment: Moment, inode: int, draw: random.Random) -> bytes:
    if inode in moment.synced_bytes:
        return moment.synced_bytes[inode]
    seen = moment.seen_bytes.get(inode, b"")
    return draw.choice((b"", seen[: draw.randrange(len(seen) + 1)], bytes(len(seen)), seen))


class Task:
    """A training whose syncs were observed, and its end."""

    def __init__(self, name: str, root: Path) -> None:
        words, self.world = TASKS[name]
        self.recipe, self.root = recipe_of(*words), root
        root.mkdir()
        self.disk = Disk(root)
        with self.disk.observed():
            train(self.recipe, self.world, root)
        self.end = saved(root)

    def resumed(self, folder: Path) -> dict[str, Tensor]:
        train(self.recipe, self.world, folder, resume=True)
        return saved(folder)


def run(campaign: Campaign) -> None:
    torch.set_num_threads(1)
    draw = campaign.random
    with tempfile.TemporaryDirectory() as folder:
        left = Path(folder, "left")
        tasks = {name: Task(name, Path(folder, name)) for name in TASKS}
        steps: set[int] = set()
        while campaign.going():
            name = draw.choice(list(tasks))
            task = tasks[name]
            number = draw.randrange(len(task.disk.moments))
            task.disk.leave(task.disk.moments[number], left, draw)
            campaign.made(name)
            where = f"{name}, after sync {number}"
            try:
                last = checkpoint.find(left, "last")
                steps.add(-1 if last is None else int(checkpoint.progress_of(last)["step"]))
                end = task.resumed(left)
            except Exception:
                campaign.fail("traceback", f"{where}: {traceback.format_exc(limit=-4)}")
                continue
            same = end.keys() == task.end.keys() and all(torch.equal(end[key], task.end[key]) for key in end)
            campaign.expect(same, "wrong result", f"{where}: the resumed training ends elsewhere")
        campaign.facts = {"moments": {name: len(task.disk.moments) for name, task in tasks.items()}}
        campaign.facts["resumed from steps"] = sorted(steps)
