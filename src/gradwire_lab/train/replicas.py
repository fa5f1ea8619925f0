"""Replicas: many models of one make, stacked: a row of numbers each, and one pass that may serve all of them.

Parameters lie in one float32 tensor [replicas, N], which is what gossip mixes and what an optimizer that works entry by
entry, as SGD and Adam do, steps at once. `torch.func` maps the model over the rows. What it cannot map (an LSTM of
cuDNN's), or would not run faster, goes through the rows in turn.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from gradwire.core.segments import Segments
from gradwire.integrations.model import trainable
from gradwire_lab.train.vmap_layers import WideLayers

Weights = tuple[Tensor, dict[str, Tensor]]  # a row of parameters, and buffers
Objective = Callable[[Callable[..., Any], Tensor, Tensor], Tensor]  # (model, inputs, targets) -> loss


class Replicas:
    """``count`` copies of a model.

    Attributes:
        rows: Their parameters, float32 [count, N], in the order of ``model.named_parameters()``.
        grads: Their gradients, likewise.
        parameters: By name, [count, ...]: views of ``rows`` that want gradients.
        buffers: By name, [count, ...].
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        named = trainable(model.named_parameters())
        self.model, self.count = model, count
        self.tensors = Segments(tuple(named), tuple(tuple(p.shape) for p in named.values()))
        one = torch.cat([p.detach().flatten().float() for p in named.values()])
        self.rows = one.expand(count, -1).clone()
        self.grads = torch.zeros_like(self.rows)
        self.parameters = {name: part.detach().requires_grad_() for name, part in self._views(self.rows).items()}
        self.buffers = {name: _repeated(buffer, count) for name, buffer in model.named_buffers()}
        self._into = list(self._views(self.grads).values())

    # -- passes ------------------------------------------------------------------------------------------------------

    def together(self, objective: Objective, inputs: Tensor, targets: Tensor) -> Tensor:
        """One pass for all. [count, batch, ...], [count, batch, ...] -> losses [count]; gradients are in ``grads``."""
        self.model.train()

        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return objective(self._called(parameters, buffers), x, y)

        with WideLayers():
            losses: Tensor = vmap(one, randomness="different")(self.parameters, self.buffers, inputs, targets)
        self._derive_(losses.sum(), list(self.parameters.values()), self._into)
        return losses.detach()

    def alone(self, which: int, objective: Objective, inputs: Tensor, targets: Tensor) -> Tensor:
        """One replica's pass. -> its loss; its gradients are in its row of ``grads``."""
        self.model.train()
        leaves = {name: p.detach()[which].requires_grad_() for name, p in self.parameters.items()}
        loss = objective(self._called(leaves, self.own_buffers(which)), inputs, targets)
        self._derive_(loss, list(leaves.values()), [each[which] for each in self._into])
        return loss.detach()

    def _called(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> Callable[..., Any]:
        return lambda *inputs: functional_call(self.model, (parameters, buffers), inputs)

    @staticmethod
    def _derive_(loss: Tensor, leaves: list[Tensor], into: list[Tensor]) -> None:
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        for place, grad in zip(into, found, strict=True):
            place.zero_() if grad is None else place.copy_(grad)

    # -- what a replica holds ----------------------------------------------------------------------------------------

    def own(self, which: int) -> Weights:
        """The parameters and buffers of one replica."""
        return self.rows[which], self.own_buffers(which)

    def own_buffers(self, which: int) -> dict[str, Tensor]:
        return {name: buffer[which] for name, buffer in self.buffers.items()}

    @torch.no_grad()
    def show_(self, row: Tensor, buffers: dict[str, Tensor]) -> nn.Module:
        """The template, holding a row of parameters and some buffers, ready to be evaluated."""
        named = dict(self.model.named_parameters())
        for name, part in zip(self.tensors.names, row.split(list(self.tensors.lengths)), strict=True):
            named[name].copy_(part.view_as(named[name]))
        for name, buffer in self.model.named_buffers():
            buffer.copy_(buffers[name])
        return self.model.eval()

    def _views(self, rows: Tensor) -> dict[str, Tensor]:
        """Each tensor of a model in all rows."""
        parts = rows.split(list(self.tensors.lengths), dim=1)
        return {
            name: part.view(self.count, *shape)
            for name, shape, part in zip(self.tensors.names, self.tensors.shapes, parts, strict=True)
        }


def _repeated(x: Tensor, count: int) -> Tensor:
    return x.detach().expand(count, *x.shape).clone()
