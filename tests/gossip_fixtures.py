"""Fixtures of the gossip tests: vectors as models, and replicas that train for a few steps."""

from typing import Any

import torch
from torch import Tensor, nn

import fixtures
import gradwire
from gradwire.topology import Topology

SHAPES = ((12, 9), (31,), (5, 4, 3))
LENGTH = 12 * 9 + 31 + 60


class Vector(nn.Module):
    """Parameters without a loss: a matrix, a vector and a small filter."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in SHAPES)


def vectors(ranks: int, seed: int = 0) -> Tensor:
    return torch.randn(ranks, LENGTH, generator=torch.Generator().manual_seed(seed))


def simulated(ranks: int, spec: str, codec: str | None = None, **options: Any) -> gradwire.SimulatedGossip:
    return gradwire.gossip_lockstep([Vector() for _ in range(ranks)], spec, codec, **options)


def spread(x: Tensor) -> float:
    """The sum over ranks of the squared distance to the mean."""
    return float((x.double() - x.double().mean(0)).square().sum())


def dense_factor(topology: Topology) -> float:
    """By what a period of dense gossip multiplies the distance to the mean, at most: |W_p ... W_1 - 1 1^T / n|."""
    return float(torch.linalg.matrix_norm(topology.product() - 1.0 / topology.size, 2))


def train(
    nets: Any, models: list[nn.Module], optimizers: list[torch.optim.Optimizer], ranks: range, steps: range
) -> None:
    """Train the replicas of some ranks, and call their net after each step."""
    for step in steps:
        for rank, model, optimizer in zip(ranks, models, optimizers, strict=True):
            optimizer.zero_grad()
            fixtures.loss(model, rank, step).backward()
            optimizer.step()
        nets()


def replicas(ranks: int) -> list[nn.Module]:
    return [fixtures.model(seed) for seed in range(ranks)]


def optimizers(models: list[nn.Module]) -> list[torch.optim.Optimizer]:
    return [fixtures.sgd(model, momentum=0.9) for model in models]
