"""The outer weights: the point that all workers share, and the optimizer that moves it."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.core import Gather, Payload, Scope, Sum, byte_tensor, raw_bytes
from gradwire.engine import RoundGenerator
from gradwire.integrations.model import local_part, reshard
from gradwire.local.method import LocalMethod, OuterFactory


class OuterWeights:
    """Float32 weights by parameter name, and the mean of the model's buffers as of the last round.

    Attributes:
        weights: They are parameters of the outer optimizer.
        buffers: Those that are saved with the model and hold numbers, such as statistics of batch norm.
        optimizer: Steps the weights by the mean difference.
        is_given: Whether the user made it, so that rates of the method are not its own.
        kept: By how much the model was ahead of the weights when the round began, by name; nothing, unless the method
            keeps errors.
        hidden: The model's own parameters and buffers, while it has the outer ones for evaluation.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Mapping[str, nn.Parameter],
        method: LocalMethod,
        make: OuterFactory | None = None,
        place: torch.device | str | None = None,
    ) -> None:
        saved = model.state_dict(keep_vars=True).keys()
        named = {name: x for name, x in model.named_buffers() if name in saved and x.is_floating_point()}
        self._model, self._local, self._local_buffers = model, parameters, named
        self._own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        self.weights = {name: nn.Parameter(_copy(local_part(p.detach()), place)) for name, p in parameters.items()}
        self.buffers = {name: x.detach().clone() for name, x in named.items()}
        self.is_given = make is not None
        self.optimizer = (make or method.outer)(list(self.weights.values()))
        self.kept: dict[str, Tensor] = {}
        self.hidden: dict[str, Tensor] | None = None

    @torch.no_grad()
    def differences(self, names: Iterable[str] | None = None) -> dict[str, Tensor]:
        """Where the round began less local weights, in the parameter's own format: rounding is no difference."""
        return {name: self._begin(name).float() - self._part(name).float() for name in (names or self._local)}

    def differs(self) -> bool:
        """Whether the model's weights are not those with which the round began, as far as float32 holds them."""
        return not all(torch.equal(self._begin(name).float(), self._part(name).float()) for name in self._local)

    def _part(self, name: str) -> Tensor:
        """What this rank has of a parameter of the model."""
        return local_part(self._local[name])

    def _begin(self, name: str) -> Tensor:
        """The outer weight less what is kept, where the model has it and as its format holds it."""
        p, weight = self._part(name), self.weights[name]
        begin = weight.to(p.device) - self.kept[name] if name in self.kept else weight
        return begin.to(device=p.device, dtype=p.dtype)

    def step(self, updates: Mapping[str, Tensor]) -> None:
        """Move weights by the mean difference; those without one stay."""
        for name, update in updates.items():
            self.weights[name].grad = update.view_as(self.weights[name]).to(self.weights[name].device)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def restart(
        self, alpha: float = 0.0, names: Iterable[str] | None = None, kept: Mapping[str, Tensor] | None = None
    ) -> None:
        """Set the model to the outer weights, less what is kept; it has the share ``alpha`` of its own besides."""
        reshard(self._model)
        self.kept = dict(kept or {})
        for name in names or self._local:
            p, weight = self._part(name), self._begin(name)
            p.copy_(torch.lerp(weight, p, alpha) if alpha else weight)

    @torch.no_grad()
    def restart_buffers(self) -> None:
        """Set the model's buffers to their mean as of the last round."""
        for name, x in self._local_buffers.items():
            x.copy_(self.buffers[name])

    @torch.no_grad()
    def copy_from_model(self) -> None:
        """In the start: take the model's weights, which are the same on all ranks, and this rank's own buffers."""
        for name in self._local:
            self.weights[name].copy_(self._part(name))
        for name, x in self._local_buffers.items():
            self.buffers[name].copy_(x)

    @torch.no_grad()
    def average_if_different(self, world: int, scope: Scope) -> RoundGenerator[int]:
        """After a start on the same batches: where ranks differ, by rounding, all take the mean. Returns bytes sent."""
        parts = {name: self._part(name) for name in self._local}
        own = torch.cat([p.flatten().float() for p in parts.values()])
        digest = hashlib.sha256(raw_bytes(own)).digest()
        mine = byte_tensor(digest).to(own.device)
        (digests,) = yield [Gather(Payload(mine), scope=scope)]
        if all(torch.equal(other.data[: mine.numel()], digests[0].data[: mine.numel()]) for other in digests):
            return mine.numel()
        (total,) = yield [Sum(own, scope)]
        means = total.div(world).split([p.numel() for p in parts.values()])
        for (name, p), mean in zip(parts.items(), means, strict=True):
            self.weights[name].copy_(mean.view_as(p))
        self.restart()
        return mine.numel() + own.nbytes

    @torch.no_grad()
    def flat_buffers(self) -> Tensor:
        """The model's own buffers as one vector."""
        return torch.cat([x.flatten().float() for x in self._local_buffers.values()] or [torch.zeros(0)])

    @torch.no_grad()
    def average_buffers(self, own: Tensor, world: int) -> RoundGenerator[None]:
        """Average the buffers of all ranks. Where the mean is not finite, the last one stays."""
        if not self.buffers:
            return
        (total,) = yield [Sum(own, "world")]
        parts = total.div(world).split([x.numel() for x in self.buffers.values()])
        for x, mean in zip(self.buffers.values(), parts, strict=True):
            x.copy_(torch.where(mean.isfinite(), mean, x.flatten()).view_as(x))

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """A context in which the model has the outer weights and buffers. Inside of itself it changes nothing."""
        if self.hidden is not None:
            yield
            return
        self.hidden, kept = self.model_tensors(), self.kept
        self.restart()
        self.restart_buffers()
        self.kept = kept  # a state that is saved in here has it
        try:
            yield
        finally:
            self.load_model_tensors(self.hidden)
            self.hidden = None

    def configure(self, method: LocalMethod) -> None:
        """Take over another method's rate and momentum, unless the optimizer is the user's own; the state stays."""
        changed = {"lr": method.rate, "momentum": method.momentum, "nesterov": method.nesterov}
        for group in () if self.is_given else self.optimizer.param_groups:
            group.update(changed)

    # -- checkpoints -----------------------------------------------------------------------------------------------

    def model_tensors(self) -> dict[str, Tensor]:
        """Parameters and buffers of the model itself, by name; of sharded ones, this rank's part."""
        if self.hidden is not None:
            return dict(self.hidden)
        return {name: local_part(x.detach()).clone() for name, x in self._own.items()}

    @torch.no_grad()
    def load_model_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        """Set the model's own parameters and buffers."""
        reshard(self._model)
        for name, x in self._own.items():
            local_part(x).copy_(tensors[name])

    def remaining_tensors(self) -> dict[str, Tensor]:
        """What is neither trained nor averaged: frozen parameters, counters of batch norm."""
        held = {name: x for name, x in self._own.items() if name not in self.weights and name not in self.buffers}
        return {f"rest/{name}": on_host(x) for name, x in held.items()}

    @torch.no_grad()
    def load_remaining_tensors(self, state: Mapping[str, Tensor]) -> None:
        """Take over what `remaining_tensors` has."""
        for name, x in self._own.items():
            if f"rest/{name}" in state:
                x.copy_(state[f"rest/{name}"])

    def state_dict(self) -> dict[str, Tensor]:
        """Weights, buffers, the optimizer's rates and its state, as tensors on the CPU by kind and name.

        Its numbers that are no tensors are below ``number/``.
        """
        rates = torch.tensor([group["lr"] for group in self.optimizer.param_groups], dtype=torch.float64)
        state: dict[str, Any] = {"rate": rates}
        state |= {f"outer/{name}": x for name, x in self.weights.items()}
        state |= {f"buffer/{name}": x for name, x in self.buffers.items()}
        for name, x in self.weights.items():
            for key, value in self.optimizer.state.get(x, {}).items():
                if isinstance(value, Tensor):
                    state[f"optimizer/{key}/{name}"] = value
                elif isinstance(value, bool | int | float):  # `item` gives it back as it was
                    kind = torch.float64 if isinstance(value, float) else None
                    state[f"number/{key}/{name}"] = torch.tensor(value, dtype=kind)
        return {name: on_host(x) for name, x in state.items()}

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
            if kind in ("optimizer", "number"):
                slot, _, name = rest.partition("/")
                held = value.clone() if kind == "optimizer" else value.item()
                saved["state"].setdefault(places[name], {})[slot] = held
        self.optimizer.load_state_dict(saved)  # it knows which of them belong on the device


def nonfinite_names(outer: OuterWeights) -> list[str]:
    """Parameters whose local weights are not finite."""
    return [name for name, x in outer.model_tensors().items() if name in outer.weights and not x.isfinite().all()]


def refuse_unsaved(outer: OuterWeights) -> None:
    """Refuse to save an optimizer's state that holds more than tensors and numbers, which would begin again."""
    for name, x in outer.weights.items():
        for key, value in outer.optimizer.state.get(x, {}).items():
            if not isinstance(value, Tensor | bool | int | float | None):
                raise ValueError(
                    f"the outer optimizer {type(outer.optimizer).__name__} has {key!r} of {name!r} as a "
                    f"{type(value).__name__}, and a state holds tensors and numbers; keep it as one of these"
                )


def require_own(outer: OuterWeights, call: str) -> None:
    """Refuse a call that changes the model's own weights, while it has the outer ones."""
    if outer.hidden is not None:
        raise RuntimeError(
            f"{call} was called inside of averaged(), which takes steps back at its end; call it outside"
        )


def on_host(x: Tensor) -> Tensor:
    """A copy to save."""
    return x.detach().cpu().clone().contiguous()


def _copy(x: Tensor, place: torch.device | str | None) -> Tensor:
    """A float32 copy; on the host, in memory that a GPU copies from fast."""
    copy = x.to(device=x.device if place is None else place, dtype=torch.float32, copy=True)
    return copy.pin_memory() if x.is_cuda and copy.device.type == "cpu" else copy
