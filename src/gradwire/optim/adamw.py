"""AdamW: torch's own, which can also apply momentum that a wire has compressed.

A method such as ``onebit_adam`` freezes the variance and sends momentum instead of gradients. From then on, ``p.grad``
holds momentum, in units of gradients, and the wire gives the frozen denominators. Such a parameter is updated by

    p = p - lr * weight_decay * p - lr / (1 - beta1^t) * p.grad / denominator

All other parameters are updated as by ``torch.optim.AdamW``, and without a wire all of them are.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

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

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        denominators = self.frozen.denominators() if self.frozen is not None else {}
        held = [(p, p.grad) for p in denominators if p.grad is not None]
        for p, _ in held:
            p.grad = None  # torch's step leaves it alone
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            _torch_step(self)
        for p, momentum in held:
            p.grad = momentum
        if held and not self._overflown():
            self._apply_momentum(denominators)
        if self.frozen is not None:
            self.frozen.after_step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with the momentum that the wire holds."""
        if self.frozen is not None:
            self.frozen.store_momentum()
        return super().state_dict()

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

    @torch.no_grad()
    def _apply_momentum(self, denominators: Mapping[nn.Parameter, Tensor]) -> None:
        scale = getattr(self, "grad_scale", None)  # a fused optimizer leaves unscaling to its step
        for group in self.param_groups:
            params = [p for p in group["params"] if p in denominators and p.grad is not None]
            if not params:
                continue
            steps = [self.state[p]["step"] for p in params]
            torch._foreach_add_(steps, 1)
            rate, count = float(group["lr"]), _count(steps[0], group)
            size, divisors = rate if group["maximize"] else -rate, [denominators[p] for p in params]
            correction = 1 - float(group["betas"][0]) ** count
            if isinstance(correction, Tensor):
                divisors = list(torch._foreach_mul(divisors, correction.float()))
            else:
                size /= correction
            grads = [p.grad for p in params if p.grad is not None]
            if scale is not None:
                grads = list(torch._foreach_mul(grads, 1.0 / float(scale)))
            _update_(params, 1 - rate * group["weight_decay"], grads, divisors, size)
            self._age_variance(params, group, count)

    def _age_variance(self, params: list[nn.Parameter], group: dict[str, Any], count: Any) -> None:
        """Keep the variance what it is after torch's correction of its bias, which counts this step as measured."""
        beta = float(group["betas"][1])
        ratio = (1 - beta**count) / (1 - beta ** (count - 1))
        ratio = ratio.float() if isinstance(ratio, Tensor) else ratio
        if isinstance(ratio, Tensor) or ratio - 1 > 2**-25:
            names = [name for name in ("exp_avg_sq", "max_exp_avg_sq") if name in self.state[params[0]]]
            torch._foreach_mul_([self.state[p][name] for p in params for name in names], ratio)

    def _overflown(self) -> bool:
        """Whether a GradScaler found that this step must be left out."""
        found = getattr(self, "found_inf", None)
        return found is not None and bool(found)

    def _group_of(self, p: nn.Parameter) -> dict[str, Any]:
        return next(group for group in self.param_groups if any(p is other for other in group["params"]))


def _count(step: Tensor, group: dict[str, Any]) -> Any:
    """The number of steps: a float, or, where it is on the device and reading it would mean waiting, a tensor."""
    return step.double() if group["fused"] or group["capturable"] else float(step)


def _update_(
    params: Sequence[Tensor], shrink: float, xs: list[Tensor], denominators: list[Tensor], size: float
) -> None:
    """``p = shrink * p + size * x / denominator``, which is in float32; parameters of fewer bits are rounded once."""
    wide = [p if p.dtype == torch.float32 else p.float() for p in params]
    torch._foreach_mul_(wide, shrink)
    torch._foreach_addcdiv_(wide, [x.float() for x in xs], denominators, value=size)
    for p, x in zip(params, wide, strict=True):
        if p is not x:
            p.copy_(x)
