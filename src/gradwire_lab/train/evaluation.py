"""Evaluation: how good a model is on examples that it was not trained on, summed over all processes."""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from gradwire_lab.train.data import Batch, Task, TextTask
from gradwire_lab.train.data.sequences import IGNORED
from gradwire_lab.train.loading import recurrent
from gradwire_lab.train.models.regime import transform_of
from gradwire_lab.train.precision import autocast


class Score(NamedTuple):
    """The outcome.

    Attributes:
        loss: Cross entropy per example, or per token.
        metric: ``top1``, the share of images whose class was guessed, or ``perplexity``.
        value: Of the metric.
        top5: The share of images whose class was among five guesses; None of text.
    """

    loss: float
    metric: str
    value: float
    top5: float | None


@torch.no_grad()
def evaluate_model(
    model: nn.Module, task: Task, batches: Iterator[Batch], total: Callable[[Tensor], Tensor], precision: str = "fp32"
) -> Score:
    """Evaluate; ``total`` adds up the sums of all processes, each over its share."""
    model.eval()
    device = next(model.parameters()).device
    transform = transform_of(model, training=False)
    sums = torch.zeros(4, dtype=torch.float64, device=device)
    state = None
    for inputs, targets in batches:
        inputs = transform(inputs) if transform is not None else inputs
        with autocast(device, precision):
            if recurrent(model):
                state = model.start(len(inputs)) if state is None else state  # type: ignore[operator]
                logits, state = model(inputs, state)
            else:
                logits = model(inputs)
        sums += _sums(logits.flatten(0, -2).float(), targets.flatten())
    whole = total(sums)
    loss, _, top1, top5 = (whole / whole[1].clamp(min=1.0)).tolist()
    if isinstance(task, TextTask):
        return Score(loss, "perplexity", math.exp(min(loss, 50.0)), None)
    return Score(loss, "top1", top1, top5)


def _sums(logits: Tensor, targets: Tensor) -> Tensor:
    """Loss, examples, right first guesses, and right among five."""
    loss = F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")
    guesses = logits.topk(min(5, logits.shape[-1]), dim=-1).indices == targets[:, None]
    return torch.stack([loss, (targets != IGNORED).sum(), guesses[:, 0].sum(), guesses.sum()]).double()


def chance_level(task: Task) -> tuple[str, float]:
    """The metric, and its value for a model that guesses."""
    if isinstance(task, TextTask):
        return "perplexity", float(len(task.vocab))
    return "top1", 1.0 / task.classes


def better(metric: str, value: float, best: float | None) -> bool:
    """Whether a value beats the best so far."""
    return best is None or (value > best if metric == "top1" else value < best)
