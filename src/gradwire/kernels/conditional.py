"""Undo what a dropped step has written, when only the device knows whether the step was dropped."""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradwire.kernels.dispatch import kernel


@kernel
def copy_if_(dropped: Tensor, now: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    """If ``dropped``, one bool, holds, copy what tensors were before. Else nothing is touched."""
    # Chosen, not multiplied: zero times what is not finite would not be zero.
    for x, old in zip(now, before, strict=True):
        x.copy_(torch.where(dropped, old, x))


@kernel
def zero_if_(dropped: Tensor, updates: Sequence[Tensor]) -> None:
    """If ``dropped`` holds, updates become zero. Else nothing is touched."""
    for x in updates:
        x.copy_(torch.where(dropped, 0.0, x))
