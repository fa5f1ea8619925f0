"""Trainings small enough for a test."""

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn

from gradwire_lab.train import checkpoint, recipe_files
from gradwire_lab.train.rank_info import simulated_ranks
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.record import open_folder
from gradwire_lab.train.run_recipe import TrainJob, run_recipe

DIGITS = ("train.batch=240", "train.epochs=2", "model.options={width=4}", "train.log_every=2")  # five steps an epoch
LSTM = (
    "model.options={hidden=16, layers=2, dropout=0.2}",
    "train.batch=8",
    "train.batch_per=world",
    "data.length=400",
    "data.options={level='byte'}",
    "train.iterations=4",
)
GPT = (
    "model.options={width=16, layers=1, heads=2, context=32}",
    "data.length=32",
    "train.batch=16",
    "train.batch_per=world",
    "train.iterations=4",
    "data.columns=200",
)


def recipe_of(name: str, *overrides: str) -> Recipe:
    small = {"digits": DIGITS, "pydoc-lstm": LSTM, "pydoc-gpt": GPT}[name]
    return recipe_files.resolve([name], [*small, *overrides])


def train(recipe: Recipe, world: int, folder: Path, resume: bool = False, heard: list[Any] | None = None) -> Any:
    """Virtual workers; the final record."""
    open_folder(folder, recipe)
    return run_recipe(
        TrainJob(recipe, folder, resume=resume),
        simulated_ranks(world),
        (heard if heard is not None else []).append,
    )


def saved(folder: Path, file: str = "model.safetensors") -> dict[str, Tensor]:
    found = checkpoint.find(folder, "last")
    assert found is not None
    return load_file(found / file)


class Normed(nn.Sequential):
    """A model with batch norm, and a schedule of its own."""

    def __init__(self) -> None:
        super().__init__(
            nn.Flatten(),
            nn.Linear(64, 16),
            nn.BatchNorm1d(16),
            nn.ReLU(),
            nn.Linear(16, 10),
        )
        self.regime = {0: {"lr": 0.1}, 1: {"lr": 0.01}}
        self.input_transform = {"train": lambda x: 2 * x, "eval": lambda x: 2 * x}


class Pooled(nn.Sequential):
    """A model for images of any size; it writes down those that it sees in training."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.append(nn.Linear(32, 10))
        self.sides: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.training and not x.is_meta:
            self.sides.append(x.shape[-1])
        return super().forward(x)


class KillsRank1(Normed):
    """Kills its process in the seventh forward pass of rank 1, in torchrun's first attempt only.

    Given the number of a process, it interrupts that one instead.
    """

    def __init__(self, pid: int = 0) -> None:
        super().__init__()
        self.pid, self.passes = pid, 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        again = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"
        if self.passes == 7 and dist.is_initialized() and dist.get_rank() == 1 and not again:
            os.kill(self.pid or os.getpid(), signal.SIGINT if self.pid else signal.SIGKILL)
            time.sleep(60)  # nobody goes on until the interrupted one has ended all
        return super().forward(x)


class DiesOnce(Normed):
    """Kills its process in the tenth pass of rank 1, once; the others dawdle until it is back."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.died, self.back, self.passes = Path(folder, "died"), Path(folder, "back"), 0
        log = Path(folder, "run", "run.jsonl")
        while self.died.exists() and '"event": "epoch"' not in log.read_text():
            time.sleep(0.02)  # the others have something to evaluate first

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        mine = os.environ.get("LOCAL_RANK") == "1"
        if self.training and mine and self.died.exists():
            self.back.touch()
        elif self.training and mine and self.passes == 10:
            self.died.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.training and self.died.exists() and not self.back.exists():
            time.sleep(0.05)
        return super().forward(x)


class LeftTheGroup(Exception):
    pass


class LeavesOnce(Normed):
    """Leaves in the tenth pass of rank 1, once; the other one dawdles until it is back."""

    left, back = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        mine, gone = threading.current_thread().name == "rank-1", self.left.is_set()
        self.passes = getattr(self, "passes", 0) + self.training
        if mine and self.passes == 10 and not gone:
            self.left.set()
            raise LeftTheGroup
        if mine and gone:
            self.back.set()
        elif self.training and gone and not self.back.is_set():
            time.sleep(0.1)
        return super().forward(x)
