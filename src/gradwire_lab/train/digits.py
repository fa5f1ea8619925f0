"""Digits: a real image classification small enough for a test, embedded in scikit-learn, so nothing is downloaded.

1797 handwritten digits of 8x8 pixels: 1200 to train on, 597 to test with, and a CNN of 38 thousand parameters.
"""

import time
from collections.abc import Sequence
from typing import NamedTuple, TypedDict

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import Optimizer

from gradwire.engine import method
from gradwire.feedback import MomentumCorrection
from gradwire.integrations import SGD, Report, compress
from gradwire_lab.train.launch import tell

TRAIN = 1200
BATCH = 60  # of all ranks together
MOMENTUM = 0.9


class Job(NamedTuple):
    """One way to train: three arguments of `gradwire.compress`, how long, and how fast."""

    spec: str
    feedback: str | None = None
    exchange: str | None = None
    epochs: int = 18
    lr: float = 0.05  # at first; it falls to zero in a straight line

    def __str__(self) -> str:
        extra = {"feedback": self.feedback, "exchange": self.exchange}
        return ", ".join([self.spec, *(f"{name}={value}" for name, value in extra.items() if value)])


class Epoch(TypedDict):
    """News of one epoch."""

    job: str
    epoch: int
    epochs: int
    loss: float
    accuracy: float
    seconds: float


class Result(TypedDict):
    """The end of one training, as one rank saw it."""

    job: str
    accuracy: float
    losses: list[float]
    steps: int
    skipped: int
    sent: float
    payload_ratio: float
    wire_ratio: float
    seconds: float


class Split(NamedTuple):
    """Images [n, 1, 8, 8], and what they show."""

    images: Tensor
    labels: Tensor


def load() -> tuple[Split, Split]:
    """The images to train on, and those to test with; the same split always."""
    raw = load_digits()
    images = torch.tensor(raw.data, dtype=torch.float32).view(-1, 1, 8, 8)
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAIN], order[TRAIN:]
    images = (images - images[train].mean()) / images[train].std()
    return Split(images[train], labels[train]), Split(images[test], labels[test])


def build(seed: int) -> nn.Module:
    """A small CNN; the same weights for the same seed, and no trace on the global generator."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )


def shards(rank: int, world: int, seed: int, epoch: int, batch: int = BATCH) -> list[Tensor]:
    """This rank's part of every batch of an epoch: positions among the training images, shuffled anew each epoch."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + epoch)
    order = torch.randperm(TRAIN, generator=generator)
    return [part[rank::world] for part in order.split(batch) if len(part) == batch]


def optimizer_for(model: nn.Module, job: Job) -> Optimizer:
    """SGD with momentum; where the feedback applies momentum before compression, SGD that leaves it at that."""
    corrected = isinstance(method(job.spec, job.feedback).feedback, MomentumCorrection)
    sgd = SGD if corrected else torch.optim.SGD
    return sgd(model.parameters(), lr=job.lr, momentum=MOMENTUM)


def accuracy_of(model: nn.Module, split: Split) -> float:
    with torch.no_grad():
        guesses = model(split.images).argmax(1)
    return float((guesses == split.labels).float().mean())


def run(rank: int, world: int, job: Job, seed: int = 0) -> Result:
    """Train with the plain loop, in a process group that is there already or alone."""
    train, test = load()
    model = build(seed)
    wire = compress(model, job.spec, feedback=job.feedback, exchange=job.exchange, seed=seed)
    optimizer = optimizer_for(model, job)
    steps = job.epochs * (TRAIN // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - step / steps)
    losses = []
    began = time.perf_counter()
    for epoch in range(job.epochs):
        total = 0.0
        batches = shards(rank, world, seed, epoch)
        for part in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(train.images[part]), train.labels[part])
            loss.backward()
            wire()  # the one line that training on one worker has not
            optimizer.step()
            schedule.step()
            total += loss.item()
        losses.append(total / len(batches))
        if rank == 0:
            tell(_news(job, epoch, losses[-1], accuracy_of(model, test), time.perf_counter() - began))
    return _result(job, accuracy_of(model, test), losses, wire.report(), time.perf_counter() - began)


def run_all(rank: int, world: int, jobs: Sequence[Job], seed: int = 0) -> list[Result]:
    """One training after another, in the same processes."""
    return [run(rank, world, job, seed) for job in jobs]


def _news(job: Job, epoch: int, loss: float, accuracy: float, seconds: float) -> Epoch:
    return Epoch(job=str(job), epoch=epoch, epochs=job.epochs, loss=loss, accuracy=accuracy, seconds=seconds)


def _result(job: Job, accuracy: float, losses: list[float], report: Report, seconds: float) -> Result:
    return Result(
        job=str(job),
        accuracy=accuracy,
        losses=losses,
        steps=report.steps,
        skipped=report.skipped,
        sent=report.sent,
        payload_ratio=report.payload_ratio,
        wire_ratio=report.wire_ratio,
        seconds=seconds,
    )
