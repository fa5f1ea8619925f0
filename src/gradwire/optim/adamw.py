"""AdamW: torch's own, which can also apply momentum that a wire has compressed.

A method such as ``onebit_adam`` freezes the variance and sends momentum instead of gradients. From then on, ``p.grad``
holds momentum, in units of gradients, and the wire gives the frozen denominators. Such a parameter is updated by

    p = p - lr * weight_decay * p - lr / (1 - beta1^t) * p.grad / denominator

All other parameters are updated as by ``torch.optim.AdamW``, and without a wire all of them are. Momentum is compressed
by `feedback/common_momentum.py` and `feedback/preconditioned_momentum.py`; `integrations/adamw_moments.py` freezes
the variance and hands momentum over.
"""

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gradwire.kernels.apply_momentum import Applied, Scalar, apply_momentum_

_VARIANCES = ("exp_avg_sq", "max_exp_avg_sq")
_SHORT = (torch.bfloat16, torch.float16)
_torch_step = inspect.unwrap(torch.optim.Adam.step)  # without the hooks, which run around our own step


class FrozenVariance(Protocol):
    """Where an optimizer finds out what a wire has frozen."""

    def denominators(self) -> Mapping[nn.Parameter, Tensor]:
        """Of the parameters whose gradients are momentum in this step."""

    def store_momentum(self) -> None:
        """Write the momentum that all ranks share into the optimizer's state."""

    def after_step(self) -> None:
        """Is called when all parameters are updated."""


class AdamW(torch.optim.AdamW):
    """``torch.optim.AdamW``, with the same arguments and state, for wires that compress its momentum.

    Attributes:
        frozen: What a wire has frozen; None without one.
    """

    frozen: FrozenVariance | None = None
    _known: "tuple[Mapping[nn.Parameter, Tensor], list[tuple[int, int]], list[_Frozen]] | None" = None
    _widened: Sequence[nn.Parameter] = ()  # whose variances are float32, and their gradients are not

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        frozen = self._split()
        with torch.set_grad_enabled(self.defaults["differentiable"]), _without(self.param_groups, frozen):
            _torch_step(self)
        if any(part.params for part in frozen) and not self._overflown():
            self._apply_momentum(frozen)
        if self.frozen is not None:
            self.frozen.after_step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the momentum that the wire holds."""
        if self.frozen is not None:
            self.frozen.store_momentum()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, which would round a frozen variance to the format of its parameter."""
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        params = [p for group in self.param_groups for p in group["params"]]
        saved = {p: state_dict["state"].get(number, {}) for number, p in zip(numbers, params, strict=True)}
        self._widened = [p for p in params if p.dtype in _SHORT and _has_wide(saved[p])]
        for p in self._widened:  # which the next step rounds after all, unless they are frozen
            wide = {
                name: saved[p][name].to(p.device, torch.float32, copy=True) for name in _VARIANCES if name in saved[p]
            }
            self.state[p].update(wide)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._known = None  # numbers of steps and formats are others

    def direction(self, p: nn.Parameter) -> float:
        """-1 where the loss is maximized: there, torch keeps the momentum of negative gradients."""
        return -1.0 if self._group_of(p)["maximize"] else 1.0

    def denominator(self, p: nn.Parameter, floor: float = 0.0) -> Tensor:
        """The root of the variance, as torch's AdamW divides by it, but no less than a share of the tensor's mean.

        A variance that was measured over few steps may be nearly zero, and what is divided by its root explodes.
        """
        state, group = self.state[p], self._group_of(p)
        if "exp_avg_sq" not in state:
            raise RuntimeError(
                f"AdamW has no variance of a parameter of shape {tuple(p.shape)} yet, and the wire is to freeze it; "
                "give the method a longer start, or load the optimizer's state first"
            )
        square = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"].float()
        unbiased = square / (1 - float(group["betas"][1]) ** float(state["step"]))
        root = unbiased.sqrt_().add_(group["eps"])
        return torch.maximum(root, floor * root.mean())

    def _split(self) -> "list[_Frozen]":
        """By group: which parameters are frozen; empty where none is. It is kept until it changes."""
        found = self.frozen.denominators() if self.frozen is not None else {}
        groups = [group["params"] for group in self.param_groups] if found else []
        known, shape = self._known, [(id(x), len(x)) for x in groups]
        if known is None or known[0] is not found or shape != known[1]:
            self._widen(found)
            parts = [_Frozen.of(params, found, self.state) for params in groups]
            self._known = known = found, shape, parts
        return known[2]

    def _widen(self, frozen: Iterable[nn.Parameter]) -> None:
        """Keep frozen variances in float32: in 16 bits, a product with a factor near 1 would be rounded away."""
        before, self._widened = self._widened, [p for p in frozen if p.dtype in _SHORT]
        for p in self._widened:
            self._convert(p, torch.float32)
        for p in set(before).difference(frozen):  # torch's step wants the format of the gradient
            self._convert(p, p.dtype)

    def _convert(self, p: nn.Parameter, dtype: torch.dtype) -> None:
        state = self.state[p]
        state.update({name: state[name].to(dtype) for name in _VARIANCES if name in state})

    @torch.no_grad()
    def _apply_momentum(self, frozen: "Sequence[_Frozen]") -> None:
        scale = getattr(self, "grad_scale", None)  # a fused optimizer leaves unscaling to its step
        for group, part in zip(self.param_groups, frozen, strict=True):
            for params in part.params:
                pairs = [(p, p.grad, part.denominators[p]) for p in params if p.grad is not None]
                if pairs:
                    self._apply(group, pairs, scale)
                if 0 < len(pairs) < len(params):
                    self._known = None  # the numbers of steps differ from now on

    def _apply(
        self, group: dict[str, Any], pairs: "Sequence[tuple[nn.Parameter, Tensor, Tensor]]", scale: Tensor | None
    ) -> None:
        """Step parameters of a group that have stepped as often: each with its momentum and its denominators."""
        params, grads, denominators = map(list, zip(*pairs, strict=True))
        states = [self.state[p] for p in params]
        steps = [state["step"] for state in states]
        torch._foreach_add_(steps, 1)
        if scale is not None:
            grads = list(torch._foreach_mul(grads, 1.0 / float(scale)))
        variances = [state[name] for state in states for name in _VARIANCES if name in states[0]]
        parts = Applied(params, grads, denominators, variances)
        shrink = 1 - float(group["lr"]) * group["weight_decay"]
        apply_momentum_(params[0], parts, shrink, *_factors(steps[0], group))

    def _overflown(self) -> bool:
        """Whether a GradScaler found that this step must be left out."""
        found = getattr(self, "found_inf", None)
        return found is not None and bool(found)

    def _group_of(self, p: nn.Parameter) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(p is other for other in group["params"]))


def _has_wide(state: Mapping[str, Any]) -> bool:
    return any(state[name].dtype == torch.float32 for name in _VARIANCES if name in state)


class _Frozen(NamedTuple):
    """The parameters of a group whose gradients are momentum, by the number of their steps, and all others."""

    params: list[list[nn.Parameter]]
    others: list[nn.Parameter]
    denominators: Mapping[nn.Parameter, Tensor]

    @classmethod
    def of(
        cls,
        params: Sequence[nn.Parameter],
        denominators: Mapping[nn.Parameter, Tensor],
        states: Mapping[Tensor, dict[str, Any]],
    ) -> "_Frozen":
        by_step: dict[float, list[nn.Parameter]] = {}
        for p in params:
            if p in denominators:
                by_step.setdefault(float(states[p]["step"]), []).append(p)
        return cls(list(by_step.values()), [p for p in params if p not in denominators], denominators)


@contextmanager
def _without(groups: list[dict[str, Any]], frozen: Sequence[_Frozen]) -> Iterator[None]:
    """Until the end, groups lack what is frozen: torch's step leaves it alone."""
    whole = [group["params"] for group in groups]
    for group, part in zip(groups, frozen, strict=False):
        group["params"] = part.others
    try:
        yield
    finally:
        for group, params in zip(groups, whole, strict=True):
            group["params"] = params


def _factors(step: Tensor, group: dict[str, Any]) -> tuple[Scalar, Scalar]:
    """What momentum over the denominators is multiplied by, and what the variance is.

    The variance stays what it is after torch's correction of its bias, which counts this step as measured. Both are
    numbers, or, where reading the number of steps would mean waiting for the device, tensors.
    """
    size = float(group["lr"]) if group["maximize"] else -float(group["lr"])
    mean, variance = map(float, group["betas"])
    if group["fused"] or group["capturable"]:
        first, now, before = (1 - _powers(mean, variance, step)).unbind()
        return (size / first).float(), (now / before).float()
    count = float(step)
    ratio = (1 - variance**count) / (1 - variance ** (count - 1))
    return size / (1 - mean**count), ratio if ratio - 1 > 2**-25 else 1.0


def _powers(mean: float, variance: float, step: Tensor) -> Tensor:
    """The first beta to the number of steps, the second one, and that of the step before; in float64."""
    betas, later = _betas(mean, variance, step.device)
    return betas.pow(step - later)


@lru_cache(maxsize=16)
def _betas(mean: float, variance: float, device: torch.device) -> tuple[Tensor, Tensor]:
    betas, later = torch.tensor([[mean, variance, variance], [0.0, 0.0, 1.0]], dtype=torch.float64, device=device)
    return betas, later
