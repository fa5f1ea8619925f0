"""Workloads: the training step that every method is measured with.

Batches are small, because compression is for those whose step is short beside their traffic; inputs are random, because
no time depends on what they say. A user's own is ``mine.py:make`` or ``package.module:make``: a function that returns a
module, as for `gradwire train`, which is fed random digits; or a module and a function from it to a loss, which brings
its own batches.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradwire_lab.train import models
from gradwire_lab.train.call_with_options import call_with_options
from gradwire_lab.train.loading import recurrent

CPU = torch.device("cpu")
DIGITS = {"classes": 10, "channels": 1, "size": 8}  # the facts of that data set
SMALL_GPT = {"width": 256, "layers": 6, "heads": 4}
Loss = Callable[[nn.Module], Tensor]


class Workload(NamedTuple):
    """A model, and how to make it a loss."""

    model: nn.Module
    loss: Loss


def images(name: str, size: int, classes: int, batch: int, device: torch.device | None = None) -> Workload:
    """A model of images, on random ones."""
    facts = {"classes": classes}
    return on_random_batch(models.build(name, {}, facts, seed=0), facts, (batch, 3, size, size), device)


def text(
    name: str, options: dict[str, int], vocab: int, context: int, batch: int, device: torch.device | None = None
) -> Workload:
    """A language model, on random tokens."""
    facts = {"vocab": vocab, "context": context}
    return on_random_batch(models.build(name, options, facts, seed=0), facts, (batch, context), device)


def on_random_batch(
    model: nn.Module, facts: Mapping[str, Any], shape: Sequence[int], device: torch.device | None = None
) -> Workload:
    """A model on random inputs of a shape: tokens, where the facts have a vocabulary, else images.

    In torch's default format and place unless there is a device; in bfloat16 where a GPU has units for it.
    """
    on_gpu = device is not None and device.type == "cuda"
    model = model if device is None else model.to(device)
    if "vocab" in facts:
        tokens = torch.randint(facts["vocab"], (shape[0], shape[1] + 1), device=device)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].flatten()
    else:
        inputs, targets = torch.randn(*shape, device=device), torch.randint(facts["classes"], shape[:1], device=device)
    if on_gpu and inputs.dim() == 4:
        inputs = inputs.to(memory_format=torch.channels_last)
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    state = model.start(shape[0]) if recurrent(model) else None  # type: ignore[operator]

    def loss(run: nn.Module) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=on_gpu):
            logits = run(inputs) if state is None else run(inputs, state)[0]
            return F.cross_entropy(logits.flatten(0, -2), targets)

    return Workload(model, loss)


def linear(width: int) -> Workload:
    """Square layers, for the study of links: nearly all of the step is traffic."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(4)))
    x = torch.randn(4, width)
    return Workload(model, lambda run: run(x).square().mean())


WORKLOADS: dict[str, Callable[[], Workload]] = {
    "lstm": partial(text, "lstm", {"hidden": 650, "layers": 2}, 10_000, 35, 2),  # Penn Treebank's, 19.8 M parameters
    "resnet20": partial(images, "resnet20", 32, 10, 32),  # CIFAR's, 0.27 M parameters
    "gpt": partial(text, "gpt", SMALL_GPT, 1024, 128, 2),
    "linear": partial(linear, 512),
}


def load(name: str) -> Workload:
    """A workload by its name, or a user's own."""
    if ":" not in name:
        if name not in WORKLOADS:
            raise ValueError(f"there is no workload {name!r}; take {', '.join(WORKLOADS)}, or your own: mine.py:make")
        return WORKLOADS[name]()
    made = _made(name)
    if isinstance(made, nn.Module):
        return on_random_batch(made, DIGITS, (60, DIGITS["channels"], DIGITS["size"], DIGITS["size"]))
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module) and callable(made[1])):
        raise ValueError(f"{name} must return a module, or one and a function from it to a loss, not {made!r:.80}")
    return Workload(*made)


def is_workload(name: str) -> bool:
    """Whether a name is one of ours, or of a user's own function that brings batches along; a plain module does not."""
    return ":" not in name or not isinstance(_made(name), nn.Module)


def _made(name: str) -> object:
    """What a user's own function returns, which is told of the digits as `gradwire train` would."""
    return call_with_options(models.load(name), "model", name, {}, {**DIGITS, "num_classes": DIGITS["classes"]})


def source(name: str) -> str:
    """The text of the file that makes a workload, which its owner may change; nothing for ours."""
    if ":" not in name:
        return ""
    path = inspect.getsourcefile(inspect.unwrap(models.load(name)))
    return Path(path).read_text(encoding="utf-8") if path else ""
