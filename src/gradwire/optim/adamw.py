"""AdamW: torch's own, which can also apply momentum that a wire has compressed.

A method such as ``onebit_adam`` freezes the variance and sends momentum instead of gradients. From then on, ``p.grad``
holds momentum, in units of gradients, and the wire gives the frozen denominators. Such a parameter is updated by

    p = p - lr * weight_decay * p - lr * p.grad / denominator

The momentum that a wire takes over is corrected for its beginning with zeros, and needs no correction later. The
state's ``step`` counts the steps that have measured the variance, by which torch corrects its bias. So nothing has to
be done to a frozen variance, which is not even read.

All other parameters are updated as by ``torch.optim.AdamW``, and without a wire all of them are. Momentum is compressed
by `feedback/common_momentum.py` and `feedback/preconditioned_momentum.py`; `integrations/adamw_moments.py` freezes
the variance and hands momentum over.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gradwire.kernels.apply_momentum import Applied, apply_momentum_

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

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._known = None  # groups are others

    def direction(self, p: nn.Parameter) -> float:
        """-1 where the loss is maximized: there, torch keeps the momentum of negative gradients."""
        return -1.0 if self._group_of(p)["maximize"] else 1.0

    def unbias(self, p: nn.Parameter) -> float:
        """What torch divides the momentum by, which began with zeros; with the sign of `direction`."""
        steps = float(self.state[p]["step"])
        return self.direction(p) * float(1 - float(self._group_of(p)["betas"][0]) ** steps)

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
            parts = [_Frozen.of(params, found) for params in groups]
            self._known = known = found, shape, parts
        return known[2]

    @torch.no_grad()
    def _apply_momentum(self, frozen: "Sequence[_Frozen]") -> None:
        scale = getattr(self, "grad_scale", None)  # a fused optimizer leaves unscaling to its step
        for group, part in zip(self.param_groups, frozen, strict=True):
            pairs = [(p, p.grad, part.denominators[p]) for p in part.params if p.grad is not None]
            if pairs:
                self._apply(group, pairs, scale)

    def _apply(
        self, group: dict[str, Any], pairs: "Sequence[tuple[nn.Parameter, Tensor, Tensor]]", scale: Tensor | None
    ) -> None:
        """Step parameters of a group, each with its momentum and its denominators."""
        params, grads, denominators = map(list, zip(*pairs, strict=True))
        if scale is not None:
            grads = list(torch._foreach_mul(grads, 1.0 / float(scale)))
        lr = float(group["lr"])
        parts = Applied(params, grads, denominators)
        apply_momentum_(params[0], parts, 1 - lr * group["weight_decay"], lr if group["maximize"] else -lr)

    def _overflown(self) -> bool:
        """Whether a GradScaler found that this step must be left out."""
        found = getattr(self, "found_inf", None)
        return found is not None and bool(found)

    def _group_of(self, p: nn.Parameter) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(p is other for other in group["params"]))


class _Frozen(NamedTuple):
    """The parameters of a group whose gradients are momentum, and all others."""

    params: list[nn.Parameter]
    others: list[nn.Parameter]
    denominators: Mapping[nn.Parameter, Tensor]

    @classmethod
    def of(cls, params: Sequence[nn.Parameter], denominators: Mapping[nn.Parameter, Tensor]) -> "_Frozen":
        frozen, others = ([p for p in params if (p in denominators) == held] for held in (True, False))
        return cls(frozen, others, denominators)


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
