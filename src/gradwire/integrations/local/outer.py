"""The outer weights: the point that all workers share, and the optimizer that moves it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.core.requests import Sum
from gradwire.engine.drive import Rounds
from gradwire.local.method import LocalMethod, OuterFactory


class OuterWeights:
    """Float32 weights by parameter name, and the mean of the model's buffers as of the last round.

    Attributes:
        weights: They are parameters of the outer optimizer.
        buffers: Those that are saved with the model and hold numbers, such as statistics of batch norm.
        optimizer: Steps the weights by the mean difference.
    """

    def __init__(self, model: nn.Module, parameters: Mapping[str, nn.Parameter], make: OuterFactory) -> None:
        saved = model.state_dict(keep_vars=True).keys()
        named = {name: x for name, x in model.named_buffers() if name in saved and x.is_floating_point()}
        self._local, self._local_buffers = parameters, named
        self._own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.weights = {name: nn.Parameter(p.detach().float().clone()) for name, p in parameters.items()}
        self.buffers = {name: x.detach().clone() for name, x in named.items()}
        self.optimizer = make(list(self.weights.values()))

    @torch.no_grad()
    def differences(self) -> dict[str, Tensor]:
        """Outer less local weights. What a parameter's own format cannot hold of the outer weight is no difference."""
        return {name: self.weights[name].to(p.dtype).float() - p.float() for name, p in self._local.items()}

    def step(self, updates: Mapping[str, Tensor]) -> None:
        """Move the weights by the mean difference."""
        for name, weight in self.weights.items():
            weight.grad = updates[name].view_as(weight)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def restart(self, alpha: float = 0.0) -> None:
        """Set the model to the outer weights and buffers; it keeps the share ``alpha`` of its own weights."""
        for name, p in self._local.items():
            weight = self.weights[name].to(p.dtype)
            p.copy_(torch.lerp(weight, p, alpha) if alpha else weight)
        for name, x in self._local_buffers.items():
            x.copy_(self.buffers[name])

    @torch.no_grad()
    def take(self) -> None:
        """Set the outer weights to those of the model, which are the same on all ranks."""
        for name, p in self._local.items():
            self.weights[name].copy_(p)

    @torch.no_grad()
    def flat_buffers(self) -> Tensor:
        """The model's own buffers as one vector."""
        return torch.cat([x.flatten().float() for x in self._local_buffers.values()] or [torch.zeros(0)])

    @torch.no_grad()
    def average_buffers(self, own: Tensor, world: int) -> Rounds[None]:
        """Average the buffers of all ranks. Where the mean is not finite, the last one stays."""
        if not self.buffers:
            return
        (total,) = yield [Sum(own)]
        parts = total.div(world).split([x.numel() for x in self.buffers.values()])
        for x, mean in zip(self.buffers.values(), parts, strict=True):
            x.copy_(torch.where(mean.isfinite(), mean, x.flatten()).view_as(x))

    def averaged(self) -> "AbstractContextManager[None]":
        """A context in which the model has the outer weights and buffers."""
        return _Averaged(self)

    def configure(self, method: LocalMethod) -> None:
        """Take over another method's rate and momentum; the state stays."""
        changed = {"lr": method.rate, "momentum": method.momentum, "nesterov": method.nesterov}
        for group in self.optimizer.param_groups:
            group.update(changed)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def own(self) -> dict[str, Tensor]:
        """Parameters and buffers of the model itself, by name."""
        return {name: x.detach().clone() for name, x in self._own.items()}

    @torch.no_grad()
    def load_own(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the model's own parameters and buffers."""
        for name, x in self._own.items():
            x.copy_(tensors[name])

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, buffers, the optimizer's rates and its state, as tensors on the CPU by kind and name."""
        rates = torch.tensor([group["lr"] for group in self.optimizer.param_groups], dtype=torch.float64)
        state: dict[str, Any] = {"rate": rates}
        state |= {f"outer/{name}": x for name, x in self.weights.items()}
        state |= {f"buffer/{name}": x for name, x in self.buffers.items()}
        for name, x in self.weights.items():
            held = self.optimizer.state.get(x, {}).items()
            state |= {f"optimizer/{key}/{name}": value for key, value in held if isinstance(value, Tensor)}
        return {name: x.detach().cpu().clone().contiguous() for name, x in state.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over weights, buffers, rates and the optimizer's state."""
        for kind, tensors in (("outer", self.weights), ("buffer", self.buffers)):
            for name, x in tensors.items():
                x.copy_(state[f"{kind}/{name}"])
        for group, rate in zip(self.optimizer.param_groups, state["rate"].tolist(), strict=True):
            group["lr"] = rate
        saved = self.optimizer.state_dict()
        saved["state"] = {}
        places = {name: i for i, name in enumerate(self.weights)}
        for key, value in state.items():
            kind, _, rest = key.partition("/")
            if kind == "optimizer":
                slot, _, name = rest.partition("/")
                saved["state"].setdefault(places[name], {})[slot] = value.clone()
        self.optimizer.load_state_dict(saved)  # it knows which of them belong on the device


class _Averaged(AbstractContextManager[None]):
    """Sets the model to the outer weights, and back."""

    def __init__(self, outer: OuterWeights) -> None:
        self.outer = outer

    def __enter__(self) -> None:
        self.own = self.outer.own()
        self.outer.restart()

    def __exit__(self, *error: object) -> None:
        self.outer.load_own(self.own)
