"""Feedback: what happens to what was lost.

The walk of one step: `compensate` adds yesterday's debt, the codec speaks, `settle` writes down today's debt (locally,
before the wire), and `release` turns what the group agreed on into the update.
"""

import math
from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor

from gradwire.codecs.stage import Decoded, Memory
from gradwire.core.spec import write
from gradwire.kernels.fused import Accumulation


class Feedback(ABC):
    """A frozen rule about memories; the memories themselves are passed in and out."""

    name: ClassVar[str]
    kind: ClassVar[str]
    examples: ClassVar[tuple[str, ...]]
    memories: ClassVar[dict[str, str]] = {}  # name -> how a new world reshards it (see `StateSpec`)
    indebted: ClassVar[bool] = True  # what was not sent today is sent later
    listens: ClassVar[bool] = True  # `settle` uses what receivers will decode
    changes_mean: ClassVar[bool] = False  # `release` makes another update of the mean
    accumulation: Accumulation | None = None  # how a gradient enters the memories, if fused kernels know it
    masks: bool = False  # momentum is zeroed where an entry was sent

    def __str__(self) -> str:
        return write(self)

    @abstractmethod
    def compensate(self, grad: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """What should be said today."""

    @abstractmethod
    def settle(self, target: Tensor, sent: Decoded, memory: Memory) -> Memory:
        """The memory after saying ``sent`` where ``target`` was meant."""

    def release(self, mean: Tensor, memory: Memory) -> tuple[Tensor, Memory]:
        """The update that the group's mean stands for."""
        return mean, memory

    def debt(self, memory: Memory) -> Tensor | None:
        """What is still to be said; the mean over ranks is the pending update. None where nothing is owed."""
        del memory
        return None

    def clip_factor(self, norm: float, world: int) -> float:
        """What a local gradient of this norm is multiplied by before anything else."""
        del norm, world
        return 1.0


def clip_factor(norm: float, limit: float, world: int) -> float:
    """DGC's local clipping: N workers of norm limit/sqrt(N) add up to about limit."""
    most = limit / math.sqrt(world)
    return most / norm if norm > most else 1.0
