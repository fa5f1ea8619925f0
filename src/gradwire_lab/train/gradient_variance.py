"""GradientVariance: how much the gradient varies from pass to pass of one step, for the variance-based selector.

The paper sums (g_z / B)^2 over the samples z of a batch of B. Here the M passes of a step stand for the samples: each
leaves g_m / M in the gradients, whose square is added.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


class GradientVariance:
    """Second moments of what the passes of one worker add to the gradients of its parameters.

    Attributes:
        moments: By parameter.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.parameters, self.moments = parameters, dict[str, Tensor]()
        self._before: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, scale: Tensor | float) -> None:
        """Add the last pass, in units of the unscaled loss."""
        for name, p in self.parameters.items():
            if p.grad is not None:
                added = p.grad - self._before.get(name, 0.0)
                self._before[name] = p.grad.clone()
                self.moments[name] = self.moments.get(name, 0.0) + (added / scale).square()

    def scale(self, factor: Tensor) -> None:
        """The gradients were multiplied by that after they had been added."""
        for moment in self.moments.values():
            moment.mul_(factor.square())
