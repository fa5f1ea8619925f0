"""Demo: the recipe ``digits`` with several specs, one training after another in the same processes."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from gradwire_lab.launch import send_message
from gradwire_lab.train.loop import Training
from gradwire_lab.train.rank_info import RankInfo
from gradwire_lab.train.recipe_files import resolve


class DemoJob(NamedTuple):
    """One training: three arguments of `gradwire.compress`, how long, and the first learning rate."""

    spec: str
    feedback: str | None = None
    exchange: str | None = None
    epochs: int = 18
    lr: float = 0.05

    def __str__(self) -> str:
        extra = {"feedback": self.feedback, "exchange": self.exchange}
        return ", ".join([self.spec, *(f"{name}={value}" for name, value in extra.items() if value)])


def train_all(rank: int, world: int, jobs: Sequence[DemoJob], seed: int = 0) -> list[dict[str, Any]]:
    """The final record of every job, as one rank sees it; rank 0 sends the record of every epoch to the launcher."""
    return [_train(rank, world, job, seed) for job in jobs]


def _train(rank: int, world: int, job: DemoJob, seed: int) -> dict[str, Any]:
    label = {"job": str(job), "epochs": job.epochs}

    def listen(record: dict[str, Any]) -> None:
        if rank == 0 and record["event"] == "epoch":
            send_message({**record, **label})

    sync = {"spec": job.spec, "feedback": job.feedback or "auto", "exchange": job.exchange or "auto"}
    settings: dict[str, object] = {"train.epochs": job.epochs, "train.seed": seed, "optimizer.lr": job.lr}
    settings["data.options.standardize"] = "true"
    settings |= {f"sync.{name}": value for name, value in sync.items()}
    recipe = resolve(["digits"], [f"{key}={value}" for key, value in settings.items()])
    training = Training(recipe, RankInfo(world, (rank,), torch.device("cpu")))
    return {**training.run(listen, lambda *_: None), **label}
