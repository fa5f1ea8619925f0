"""The memories that fused kernels read and write."""

from collections.abc import Iterable

import torch
from torch import Tensor

from gradwire.core.layout import Flat
from gradwire.engine.state import LaneMemory, LaneState
from gradwire.feedback import Feedback
from gradwire.kernels.momentum import next_momentum_


def kernel_outputs(names: Iterable[str], state: LaneState, storage: LaneMemory) -> dict[str, Tensor]:
    """Where new memories go that kernels write."""
    there = storage.tensors
    return {name: there[name] if name in there else torch.empty_like(state.tensors[name]) for name in names}


def residual_and_momentum(memory: dict[str, Tensor], part: slice) -> tuple[Tensor, Tensor | None]:
    """Residual, and momentum, if there is one."""
    momentum = memory.get("momentum")
    return memory["residual"][part], None if momentum is None else momentum[part]


def enter_momentum(
    feedback: Feedback, grad: Flat, part: slice, state: LaneState, memory: dict[str, Tensor]
) -> tuple[Flat, Tensor | None]:
    """What enters the residual: the gradient, or the momentum it makes; then also whether it was nonfinite."""
    averaging = feedback.averaging
    if averaging is None:
        return grad, None
    out = memory["momentum"][part] if averaging.keeps else torch.empty_like(memory["residual"][part])
    return out, next_momentum_(grad, averaging.momentum(state.tensors, part), out)
