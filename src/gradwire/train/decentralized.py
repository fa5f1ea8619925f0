"""Decentralized: train N replicas that gossip, all in this process, and say how they did.

It is what the tables of papers on gossip need: the accuracy of each worker and of the mean model, the distance between
replicas epoch by epoch, and true bytes. One pass of stacked replicas serves all workers, on a CPU or one GPU.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradwire.adapters.gossip import GossipReport, gossip_lockstep
from gradwire.gossip.letter import Diverged
from gradwire.gossip.rate import rate_scale
from gradwire.train.data import Augment, ImageLoader, ImageTask, evaluation
from gradwire.train.replicas import Replicas


@dataclass(frozen=True)
class Plan:
    """How to train.

    Attributes:
        spec: The gossip, such as ``"choco(ring)"``.
        codec: What messages are written in.
        workers: How many replicas.
        epochs: Passes over the data of all workers.
        batch: Images of one worker.
        lr: The rate of one worker alone.
        scale: Times `rate_scale` of the graph, or this number.
        warmup: Share of the training in which the rate rises from ``lr`` to its scaled value.
        drops: Shares of the training after which the rate falls to a tenth.
        partition: Who sees what: ``shuffled``, ``fixed``, or ``sorted`` by label.
        overlap: Whether what messages change comes one step late.
    """

    spec: str
    codec: str | None = None
    workers: int = 8
    epochs: int = 10
    batch: int = 128
    lr: float = 0.1
    scale: float | None = None
    warmup: float = 0.02
    drops: tuple[float, ...] = (0.5, 0.75)
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 1e-4
    decay_norms: bool = False
    partition: str = "shuffled"
    overlap: bool = False
    seed: int = 0
    augment: Augment = field(default_factory=Augment)


@dataclass(frozen=True)
class Epoch:
    """One epoch of all workers."""

    loss: float
    distance: float
    gamma: float
    rate: float
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """How a training ended.

    Attributes:
        workers: Test accuracy of each replica.
        mean: Test accuracy of the mean model.
        history: Epoch by epoch.
        report: The first worker's account.
        diverged: The sentence, if parameters were no longer finite; accuracies are then of chance.
    """

    workers: list[float]
    mean: float
    history: list[Epoch]
    report: GossipReport
    diverged: str | None = None

    @property
    def accuracy(self) -> float:
        """The mean over workers."""
        return sum(self.workers) / len(self.workers)


def study(
    task: ImageTask, make: Callable[[], nn.Module], plan: Plan, hear: Callable[[Epoch], None] = lambda news: None
) -> Outcome:
    """Train as planned; ``task`` lies on the device to train on."""
    device = task.train.pixels.device
    model = make().to(device)
    net = gossip_lockstep([model] * plan.workers, plan.spec, plan.codec, overlap=plan.overlap, seed=plan.seed)
    replicas = Replicas(model, plan.workers)
    optimizer = _optimizer(replicas, plan)
    loader = ImageLoader(
        task, plan.batch, plan.workers, tuple(range(plan.workers)), plan.seed, plan.augment, plan.partition
    )
    top = rate_scale(net.nodes[0].topology) if plan.scale is None else plan.scale
    steps, step, history = plan.epochs * loader.steps, 0, []
    try:
        for number in range(plan.epochs):
            began, total = time.perf_counter(), torch.zeros((), device=device)
            for inputs, targets in loader.epoch(number):
                rate = _set_rate(optimizer, plan, top, step / steps)
                total += _step(replicas, optimizer, inputs, targets)
                replicas.write_(net.mix(replicas.read()))
                step += 1
            distance, gamma = _distance(replicas.read()), net.nodes[0].gamma
            seconds = time.perf_counter() - began
            history.append(Epoch(float(total) / loader.steps, distance, gamma, rate, seconds))
            hear(history[-1])
    except Diverged as wrong:
        chance = 1.0 / task.classes
        return Outcome([chance] * plan.workers, chance, history, net.report(), str(wrong))
    workers = [accuracy_of(replicas.show_(rank), task) for rank in range(plan.workers)]
    return Outcome(workers, accuracy_of(replicas.show_(None), task), history, net.report())


def accuracy_of(model: nn.Module, task: ImageTask, batch: int = 1000) -> float:
    """The share of test images that a model in evaluation mode gets right."""
    right = torch.zeros((), device=task.test.labels.device)
    with torch.no_grad():
        for inputs, targets in evaluation(task, batch):
            right += (model(inputs).argmax(1) == targets).sum()
    return float(right) / len(task.test)


def _step(replicas: Replicas, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> Tensor:
    """One local step of all replicas; their mean loss."""
    optimizer.zero_grad()
    stacked = inputs.view(replicas.count, -1, *inputs.shape[1:])
    losses = replicas.losses(stacked, targets.view(replicas.count, -1), F.cross_entropy)
    losses.sum().backward()
    optimizer.step()
    return losses.detach().mean()


def _optimizer(replicas: Replicas, plan: Plan) -> torch.optim.SGD:
    flat = [
        p for p in replicas.parameters.values() if p.dim() <= 2
    ]  # norms and biases, below their replica's dimension
    deep = [p for p in replicas.parameters.values() if p.dim() > 2]
    groups = [
        {"params": deep, "weight_decay": plan.weight_decay},
        {"params": flat, "weight_decay": plan.weight_decay if plan.decay_norms else 0.0},
    ]
    kept = [group for group in groups if group["params"]]
    return torch.optim.SGD(kept, lr=plan.lr, momentum=plan.momentum, nesterov=plan.nesterov)


def _set_rate(optimizer: torch.optim.Optimizer, plan: Plan, top: float, done: float) -> float:
    warm = min(1.0, done / plan.warmup) if plan.warmup else 1.0
    rate = plan.lr * (1.0 + (top - 1.0) * warm) * 0.1 ** sum(done >= drop for drop in plan.drops)
    for group in optimizer.param_groups:
        group["lr"] = rate
    return rate


def _distance(rows: Tensor) -> float:
    return float((rows - rows.mean(0)).square().sum(1).mean().sqrt())
