"""GradientVariance: how much the gradient varies from pass to pass of one step, for the variance-based selector.

The paper sums (g_z / B)^2 over the samples z of a batch of B. Here the M passes of a step stand for the samples: each
leaves g_m / M in the gradients, whose square is added.
"""

from types import TracebackType

import torch
from torch import Tensor

from gradwire.integrations.wire import Wire


class GradientVariance:
    """Watches the gradients of one worker grow; unless it is told to, it does nothing."""

    def __init__(self, wire: Wire, watches: bool) -> None:
        self.wire, self.watches = wire, watches
        self._before: dict[str, Tensor] = {}
        self._seen: dict[str, Tensor] = {}

    def __enter__(self) -> "GradientVariance":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, why: BaseException | None, where: TracebackType | None
    ) -> None:
        if self.watches and why is None:
            self.wire.observe(self._seen)

    @torch.no_grad()
    def take_(self, scale: Tensor | float) -> None:
        """Take note of what the last pass has added, in units of the unscaled loss."""
        if not self.watches:
            return
        for name, p in self.wire.parameters.items():
            if p.grad is None:
                continue
            added = p.grad - self._before.get(name, 0.0)
            self._before[name] = p.grad.clone()
            self._seen[name] = self._seen.get(name, 0.0) + (added / scale).square()

    def shrink_(self, factor: Tensor) -> None:
        """The gradients were multiplied by that after they had been taken note of."""
        for seen in self._seen.values():
            seen.mul_(factor.square())
