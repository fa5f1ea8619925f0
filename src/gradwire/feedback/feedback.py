"""Feedback: what happens to the error of compression.

In one step, `compensate` adds the error of the step before, the codec encodes, `update_memory` keeps the new error
(locally, before the exchange), and `finalize`, where there is one, turns the group's mean into the update.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor

from gradwire.codecs.stage import Decoded, Memory
from gradwire.core.arguments import check_argument
from gradwire.core.spec import Named
from gradwire.kernels.fused import Accumulation


def divisor(memory: Memory) -> Tensor:
    """The memory "denominator"; where it has none, one."""
    denominator = memory["denominator"]
    return denominator.where(denominator > 0, 1.0)


def check_preconditioner(feedback: Any) -> None:
    """Refuse a beta or a floor that cannot be."""
    check_argument(feedback, "beta", 0.0 <= feedback.beta < 1.0, "in [0, 1), as AdamW's first beta")
    check_argument(feedback, "floor", 0.0 <= feedback.floor <= 1.0, "in [0, 1], a share of the mean")


def masked(target: Tensor, sent: Decoded, memory: Memory, masking: bool) -> Memory:
    """The memory with its new residual, and, if ``masking``, with no momentum where a selector chose."""
    momentum = memory["momentum"]
    if masking and sent.indices is not None:
        momentum = momentum.index_fill(0, sent.indices, 0.0)
    return {**memory, "momentum": momentum, "residual": sent.residual_of(target)}


class Feedback(Named):
    """A frozen rule about memories; the memories themselves are passed in and out."""

    memories: ClassVar[dict[str, str]] = {}  # name -> how a new world reshards it (see `StateSpec`)
    keeps_error: ClassVar[bool] = True  # what was not sent in this step is sent later
    needs_decoded: ClassVar[bool] = True  # `update_memory` uses what receivers will decode
    clip: float | None = None  # the norm of the mean that local gradients are clipped for
    # Optional: makes the update of the group's mean, where that is not the mean itself.
    finalize: Callable[[Tensor, Memory], tuple[Tensor, Memory]] | None = None
    accumulation: Accumulation | None = None  # how a gradient enters the memories, if fused kernels know it
    # Optional: makes what is added to the memory "residual", where that is not the gradient. No memory changes by it.
    signal: Callable[[Tensor, Memory], Tensor] | None = None
    masks: bool = False  # momentum is zeroed where an entry was sent
    needs_denominator: ClassVar[bool] = False  # uses the memory "denominator", the root of an optimizer's variance
    divide: str = "before"  # or "after": whether momentum is over the denominator when it is compressed
    floor: float = 0.1  # the smallest denominator, as a share of a tensor's mean

    @abstractmethod
    def compensate(self, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """What should be sent in this step."""

    @abstractmethod
    def update_memory(self, target: Tensor, sent: Decoded, memory: Memory) -> Memory:
        """The memory after ``sent`` was sent in place of ``target``."""

    def error(self, memory: Memory) -> Tensor | None:
        """What is still to be sent, the memory "residual"; the mean over ranks is the pending update."""
        return memory.get("residual")

    @property
    def divides(self) -> bool:
        """Whether memories are over the denominators."""
        return self.needs_denominator and self.divide == "before"

    def clip_factor(self, norm: float, world: int) -> float:
        """What a local gradient of this norm is multiplied by first. N workers of norm clip/sqrt(N) add up to clip."""
        limit = math.inf if self.clip is None else self.clip / math.sqrt(world)
        return limit / norm if norm > limit else 1.0
