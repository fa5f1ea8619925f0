"""Feedback: what happens to the error of compression.

In one step, `compensate` adds the error of the step before, the codec encodes, `update_memory` keeps the new error
(locally, before the exchange), and `finalize`, where there is one, turns the group's mean into the update.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.stage import Decoded, Memory
from gradwire.core.spec import write
from gradwire.kernels.fused import Accumulation


def preconditioned(grad: Tensor, memory: Memory) -> Tensor:
    """The gradient over the memory "denominator"; a memory without any, all zeros, divides by one."""
    denominator = memory["denominator"]
    return grad / denominator.where(denominator > 0, 1.0)


class Feedback(ABC):
    """A frozen rule about memories; the memories themselves are passed in and out."""

    name: ClassVar[str]
    kind: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]
    memories: ClassVar[dict[str, str]] = {}  # name -> how a new world reshards it (see `StateSpec`)
    keeps_error: ClassVar[bool] = True  # what was not sent in this step is sent later
    needs_decoded: ClassVar[bool] = True  # `update_memory` uses what receivers will decode
    clip: float | None = None  # the norm of the mean that local gradients are clipped for
    # Optional: makes the update of the group's mean, where that is not the mean itself.
    finalize: Callable[[Tensor, Memory], tuple[Tensor, Memory]] | None = None
    accumulation: Accumulation | None = None  # how a gradient enters the memories, if fused kernels know it
    masks: bool = False  # momentum is zeroed where an entry was sent
    needs_denominator: ClassVar[bool] = False  # gradients are divided by the memory "denominator", an optimizer's

    def __str__(self) -> str:
        return write(self)

    @abstractmethod
    def compensate(self, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """What should be sent in this step."""

    @abstractmethod
    def update_memory(self, target: Tensor, sent: Decoded, memory: Memory) -> Memory:
        """The memory after ``sent`` was sent in place of ``target``."""

    def error(self, memory: Memory) -> Tensor | None:
        """What is still to be sent, the memory "residual"; the mean over ranks is the pending update."""
        return memory.get("residual")

    def clip_factor(self, norm: float, world: int) -> float:
        """What a local gradient of this norm is multiplied by first. N workers of norm clip/sqrt(N) add up to clip."""
        limit = math.inf if self.clip is None else self.clip / math.sqrt(world)
        return limit / norm if norm > limit else 1.0
