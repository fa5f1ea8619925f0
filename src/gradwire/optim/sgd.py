"""SGD for updates that carry momentum already."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class SGD(Optimizer):
    """SGD for updates that carry momentum already, as `momentum_correction` hands them out.

    Weight decay stays local and uncompressed. It has a momentum buffer of its own, so that it is as strong as in
    momentum SGD: with ``d = momentum * d + weight_decay * p``, a step is ``p -= lr * (update + d)``.
    """

    def __init__(
        self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0, nesterov: bool = False
    ) -> None:
        for name, rate in (("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)):
            if not rate >= 0:
                raise ValueError(f"{name}={rate} is below zero, or no number; give a rate of 0 or more")
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Apply the updates that lie in ``p.grad``."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue
            updates = [p.grad for p in params]
            if group["weight_decay"]:
                updates = list(torch._foreach_add(updates, self._decay(params, group)))
            torch._foreach_add_([p.data for p in params], updates, alpha=-group["lr"])
        return loss

    def _decay(self, params: list[nn.Parameter], group: dict[str, Any]) -> list[Tensor]:
        for p in params:
            if "decay" not in self.state[p]:
                self.state[p]["decay"] = torch.zeros_like(p)
        today = torch._foreach_mul([p.data for p in params], group["weight_decay"])
        buffers = [self.state[p]["decay"] for p in params]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, today)
        if not group["nesterov"]:
            return buffers
        return list(torch._foreach_add(today, torch._foreach_mul(buffers, group["momentum"])))
