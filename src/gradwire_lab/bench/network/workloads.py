"""Workloads: the training step that every method is measured with.

Batches are small, because compression is for those whose step is short beside their traffic; inputs are random, because
no time depends on what they say. A person's own workload is a function that takes nothing and returns a model and a
function from that model to a loss: ``mine.py:make`` or ``package.module:make``.
"""

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradwire_lab.train import models

Loss = Callable[[nn.Module], Tensor]


class Workload(NamedTuple):
    """A model, and how to make it a loss."""

    model: nn.Module
    loss: Loss


def lstm() -> Workload:
    """Penn Treebank's 2x650 LSTM, 19.8 M parameters, 2 x 35 tokens."""
    model = models.build("lstm", {"hidden": 650, "layers": 2}, {"vocab": 10_000}, seed=0)
    assert isinstance(model, models.LanguageLSTM)
    tokens, state = torch.randint(10_000, (2, 36)), model.start(2)

    def loss(run: nn.Module) -> Tensor:
        logits, _ = run(tokens[:, :-1], state)
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Workload(model, loss)


def resnet20() -> Workload:
    """CIFAR's ResNet-20, 0.27 M parameters, 32 images."""
    model = models.build("resnet20", {}, {"classes": 10}, seed=0)
    images, labels = torch.randn(32, 3, 32, 32), torch.randint(10, (32,))
    return Workload(model, lambda run: F.cross_entropy(run(images), labels))


def gpt() -> Workload:
    """A GPT of 6 layers and width 256, 2 x 128 tokens."""
    model = models.build("gpt", {"width": 256, "layers": 6, "heads": 4}, {"vocab": 1024, "context": 128}, seed=0)
    tokens = torch.randint(1024, (2, 129))

    def loss(run: nn.Module) -> Tensor:
        return F.cross_entropy(run(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())

    return Workload(model, loss)


def linear(width: int) -> Workload:
    """Square layers, for the study of links: nearly all of the step is traffic."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    x = torch.randn(4, width)
    return Workload(model, lambda run: run(x).square().mean())


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "lstm": lstm,
    "resnet20": resnet20,
    "gpt": gpt,
    "linear": partial(linear, 512),
}


def load(name: str) -> Workload:
    """A workload by its name, or a person's own."""
    if ":" not in name:
        if name not in WORKLOADS:
            raise ValueError(f"there is no workload {name!r}; take {', '.join(WORKLOADS)}, or your own: mine.py:make")
        return WORKLOADS[name]()
    made: object = models.load(name)()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise ValueError(f"{name} must return a model and a function from it to a loss, but returned {made!r:.80}")
    return Workload(*made)


def source(name: str) -> str:
    """The text of the file that makes a workload, which its owner may change; nothing for ours."""
    if ":" not in name:
        return ""
    path = inspect.getsourcefile(inspect.unwrap(models.load(name)))
    return Path(path).read_text(encoding="utf-8") if path else ""
