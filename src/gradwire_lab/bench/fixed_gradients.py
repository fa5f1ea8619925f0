"""Fixed gradients: parameters of given shapes that get the same gradients at every step."""

import random
from collections.abc import Sequence
from math import isqrt, prod, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from gradwire_lab.train import models

MODELS = ("one", "resnet50", "gpt2")
ONE = 355_000_000  # entries of the single tensor, as many as GPT-2 medium has

Shapes = Sequence[tuple[int, ...]]


class FixedGradients(nn.Module):
    """Parameters of given shapes, and the gradients that they get at every step.

    Called as a model, it returns a loss whose gradients are these, so that a backward pass costs next to nothing.
    """

    def __init__(self, shapes: Shapes, device: torch.device) -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape, device=device) for shape in shapes)
        self.fixed = [torch.randn(shape, device=device) for shape in shapes]
        self._previous: list[list[Tensor | None]] = []

    @property
    def total(self) -> int:
        return sum(p.numel() for p in self.weights)

    def forward(self) -> Tensor:
        return _FixedGradients.apply(self.fixed, *self.weights)  # type: ignore[no-untyped-call, no-any-return]

    def fill_in_place(self) -> None:
        """Write the gradients where they were at the last step."""
        for p, grad in zip(self.weights, self.fixed, strict=True):
            p.grad = grad.clone() if p.grad is None else p.grad.copy_(grad)

    def fill_elsewhere(self) -> None:
        """Write the gradients to other addresses: those of up to three earlier steps are still in use."""
        self._previous.append([p.grad for p in self.weights])
        for p, grad in zip(self.weights, self.fixed, strict=True):
            p.grad = grad.clone()
        del self._previous[: -random.randint(1, 3)]


class _FixedGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *weights: Tensor) -> Tensor:
        ctx.grads = grads
        return weights[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        return None, *ctx.grads


def shapes_of(model: str, size: int = 0) -> list[tuple[int, ...]]:
    """Shapes of a model's weights; with a size, narrowed until there are about so many parameters.

    Raises:
        ValueError: There is no such model.
    """
    if model == "one":
        columns = max(1, isqrt(size or ONE) // 64 * 64 or isqrt(size or ONE))
        return [((size or ONE) // columns, columns)]
    if model not in MODELS:
        raise ValueError(f"there is no model {model!r}; take {', '.join(MODELS)}")
    facts = {"classes": 1000, "vocab": 50257, "context": 1024}
    with torch.device("meta"):
        built = models.build(model, {}, facts)
    shapes = [tuple(p.shape) for p in built.parameters() if p.dim() > 1]
    narrow = sqrt(min(1.0, size / sum(map(prod, shapes)))) if size else 1.0
    return [tuple(max(1, round(narrow * n)) for n in shape[:2]) + shape[2:] for shape in shapes]
