"""Replicas: many models of one make, stacked, so that one pass serves all of them.

Parameters and buffers get a first dimension, the replica's; `torch.func` maps the model over it. An optimizer that
works entry by entry, as SGD and Adam do, steps all replicas at once.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

Loss = Callable[[Tensor, Tensor], Tensor]


class Replicas:
    """``count`` copies of a model.

    Attributes:
        parameters: By name, [count, ...]; leaves that want gradients.
        buffers: By name, [count, ...].
    """

    def __init__(self, model: nn.Module, count: int) -> None:
        self.model, self.count = model, count
        self.parameters = {name: _repeated(p, count).requires_grad_() for name, p in model.named_parameters()}
        self.buffers = {name: _repeated(buffer, count) for name, buffer in model.named_buffers()}

    def losses(self, inputs: Tensor, targets: Tensor, loss: Loss) -> Tensor:
        """Each replica's loss on its own batch. [count, batch, ...], [count, batch] -> [count]."""
        self.model.train()

        def one(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
            return loss(functional_call(self.model, (parameters, buffers), (x,)), y)

        mapped = vmap(one, randomness="different")
        found: Tensor = mapped(self.parameters, self.buffers, inputs, targets)
        return found

    def read(self) -> Tensor:
        """All parameters as rows. -> [count, N]."""
        return torch.cat([p.detach().reshape(self.count, -1) for p in self.parameters.values()], 1)

    def write_(self, rows: Tensor) -> None:
        at = 0
        with torch.no_grad():
            for p in self.parameters.values():
                n = p[0].numel()
                p.copy_(rows[:, at : at + n].view_as(p))
                at += n

    def show_(self, which: int | None) -> nn.Module:
        """The template, with one replica's parameters and buffers, or with their means; counters are the first's."""
        with torch.no_grad():
            for name, p in self.model.named_parameters():
                p.copy_(_of(self.parameters[name], which))
            for name, buffer in self.model.named_buffers():
                buffer.copy_(_of(self.buffers[name], which))
        return self.model.eval()


def _repeated(x: Tensor, count: int) -> Tensor:
    return x.detach().expand(count, *x.shape).clone()


def _of(stacked: Tensor, which: int | None) -> Tensor:
    if which is not None:
        return stacked[which]
    return stacked.mean(0) if stacked.is_floating_point() else stacked[0]
