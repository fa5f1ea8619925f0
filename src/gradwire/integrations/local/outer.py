"""The outer weights: the point that all workers share, and the optimizer that moves it."""

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.core.payload import Payload
from gradwire.core.requests import Gather, Sum
from gradwire.engine.drive import Rounds
from gradwire.local.method import LocalMethod, OuterFactory


class OuterWeights:
    """Float32 weights by parameter name, and the mean of the model's buffers as of the last round.

    Attributes:
        weights: They are parameters of the outer optimizer.
        buffers: Those that are saved with the model and hold numbers, such as statistics of batch norm.
        optimizer: Steps the weights by the mean difference.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        make: OuterFactory,
        place: torch.device | str | None = None,
    ) -> None:
        saved = model.state_dict(keep_vars=True).keys()
        named = {name: x for name, x in model.named_buffers() if name in saved and x.is_floating_point()}
        self._local, self._local_buffers = parameters, named
        self._own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.weights = {name: nn.Parameter(_copy(p.detach(), place)) for name, p in parameters.items()}
        self.buffers = {name: x.detach().clone() for name, x in named.items()}
        self.optimizer = make(list(self.weights.values()))

    @torch.no_grad()
    def differences(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Outer less local weights. What a parameter's own format cannot hold of the outer weight is no difference."""
        local = {name: self._local[name] for name in (names or self._local)}
        return {name: self._weight(name).float() - p.float() for name, p in local.items()}

    def _weight(self, name: str) -> Tensor:
        """An outer weight, where the model has it and as its format holds it."""
        p = self._local[name]
        return self.weights[name].to(device=p.device, dtype=p.dtype)

    def step(self, updates: Mapping[str, Tensor]) -> None:
        """Move weights by the mean difference; those without one stay."""
        for name, update in updates.items():
            self.weights[name].grad = update.view_as(self.weights[name]).to(self.weights[name].device)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def restart(self, alpha: float = 0.0, names: Iterable[str] | None = None) -> None:
        """Set the model to the outer weights; it keeps the share ``alpha`` of its own."""
        for name in names or self._local:
            p, weight = self._local[name], self._weight(name)
            p.copy_(torch.lerp(weight, p, alpha) if alpha else weight)

    @torch.no_grad()
    def restart_buffers(self) -> None:
        """Set the model's buffers to their mean as of the last round."""
        for name, x in self._local_buffers.items():
            x.copy_(self.buffers[name])

    @torch.no_grad()
    def take(self) -> None:
        """Set the outer weights to those of the model, which are the same on all ranks."""
        for name, p in self._local.items():
            self.weights[name].copy_(p)

    @torch.no_grad()
    def settle(self, world: int) -> Rounds[int]:
        """After a start on the same batches: where ranks differ, by rounding, all take the mean. Returns bytes sent."""
        own = torch.cat([p.flatten().float() for p in self._local.values()])
        digest = hashlib.sha256(own.cpu().numpy().tobytes()).digest()
        mine = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(own.device)
        (digests,) = yield [Gather(Payload(mine))]
        if all(torch.equal(other.data[: mine.numel()], digests[0].data[: mine.numel()]) for other in digests):
            return mine.numel()
        (total,) = yield [Sum(own)]
        parts = total.div(world).split([p.numel() for p in self._local.values()])
        for (name, p), mean in zip(self._local.items(), parts, strict=True):
            self.weights[name].copy_(mean.view_as(p))
        self.restart()
        return mine.numel() + own.nbytes

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


def _copy(x: Tensor, place: torch.device | str | None) -> Tensor:
    """A float32 copy; on the host, in memory that a GPU copies from fast."""
    copy = x.to(device=x.device if place is None else place, dtype=torch.float32, copy=True)
    return copy.pin_memory() if x.is_cuda and copy.device.type == "cpu" else copy


class _Averaged(AbstractContextManager[None]):
    """Sets the model to the outer weights, and back."""

    def __init__(self, outer: OuterWeights) -> None:
        self.outer = outer

    def __enter__(self) -> None:
        self.own = self.outer.own()
        self.outer.restart()
        self.outer.restart_buffers()

    def __exit__(self, *error: object) -> None:
        self.outer.load_own(self.own)
