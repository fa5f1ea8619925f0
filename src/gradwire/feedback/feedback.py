"""Feedback: what happens to the error of compression.

In one step, `compensate` adds the error of the step before, the codec encodes, `update_memory` keeps the new error
(locally, before the exchange), and `finalize`, where there is one, turns the group's mean into the update.
"""

import math
from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from torch import Tensor

from gradwire.codecs import Decoded, Entries, Memory
from gradwire.core import Named, check_argument
from gradwire.core.layout import Flat
from gradwire.core.renamed import renamed_attributes
from gradwire.kernels.fused import Accumulation
from gradwire.kernels.momentum import Momentum


def divisor(memory: Memory) -> Tensor:
    """The memory "denominator"; where it has none, one."""
    denominator = memory["denominator"]
    return denominator.where(denominator > 0, 1.0)


class Averaging(NamedTuple):
    """How a gradient enters the memory "momentum", and that the residual: ``u = beta u + (1 - beta) x``.

    Attributes:
        beta: The share of momentum that stays.
        divides: x is the gradient over the memory "denominator"; else it is the gradient.
        keeps: u is the momentum of the next step. Else the momentum stays as it is until the group has agreed.
        accumulation: How u enters the residual.
    """

    beta: float
    divides: bool
    keeps: bool
    accumulation: Accumulation = Accumulation()

    def of(self, grad: Tensor, memory: Memory) -> Tensor:
        """The next u. Products, quotients and sums are rounded one by one, as by fused kernels."""
        x = grad / divisor(memory) if self.divides else grad
        return (self.beta * memory["momentum"]).add_((1.0 - self.beta) * x)

    def momentum(self, memory: Memory, part: slice) -> Momentum:
        """What kernels read of a stretch."""
        denominator = memory["denominator"][part] if self.divides else None
        return Momentum(memory["momentum"][part], denominator, self.beta)


def check_preconditioner(feedback: Any) -> None:
    """Refuse a beta or a floor that cannot be."""
    check_argument(feedback, "beta", 0.0 <= feedback.beta < 1.0, "in [0, 1), as AdamW's first beta")
    check_argument(feedback, "floor", 0.0 <= feedback.floor <= 1.0, "in [0, 1], a share of the mean")


@renamed_attributes({"keeps_mean": "mean_memory"})
class Feedback(Named):
    """A frozen rule about memories; the memories themselves are passed in and out."""

    memories: ClassVar[dict[str, str]] = {}  # name -> how a new world reshards it (see `StateSpec`)
    keeps_error: ClassVar[bool] = True  # what was not sent in this step is sent later
    needs_decoded: ClassVar[bool] = True  # `update_memory` uses what receivers will decode
    clip: float | None = None  # the norm of the mean that local gradients are clipped for
    # Optional: makes the update of the group's mean, where that is not the mean itself.
    finalize: Callable[[Tensor, Memory], tuple[Tensor, Memory]] | None = None
    # Optional: the same, where the update may be written to the last argument, in which the mean itself may lie.
    finalize_into: Callable[[Tensor, Memory, Tensor], tuple[Tensor, Memory]] | None = None
    # Optional: the same, of a mean that is there as its entries. The update is written to the last argument.
    finalize_entries: Callable[[Entries, Memory, Flat], tuple[Flat, Memory]] | None = None
    takes_scattered: ClassVar[bool] = False  # whether `finalize_entries` writes to several places; not inherited
    mean_memory: ClassVar[str | None] = None  # the memory in which `finalize` keeps the mean as it is
    accumulation: Accumulation | None = None  # how a gradient enters the memories, if fused kernels know it
    averaging: Averaging | None = None  # what enters the memory "residual" instead of the gradient
    masking: bool = False  # momentum is zeroed where an entry was sent
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
    def residual_rule(self) -> Accumulation | None:
        """How a gradient, or what averaging makes of it, enters the memory "residual", if fused kernels know it."""
        return self.accumulation if self.averaging is None else self.averaging.accumulation

    @property
    def written(self) -> tuple[str, ...]:
        """The memories that fused kernels write."""
        momentum = self.averaging.keeps if self.averaging is not None else "momentum" in self.memories
        return ("residual", "momentum") if momentum else ("residual",)

    @property
    def divides(self) -> bool:
        """Whether memories are over the denominators."""
        return self.needs_denominator and self.divide == "before"

    def clip_factor(self, norm: float, world: int) -> float:
        """What a local gradient of this norm is multiplied by first. N workers of norm clip/sqrt(N) add up to clip."""
        limit = math.inf if self.clip is None else self.clip / math.sqrt(world)
        return limit / norm if norm > limit else 1.0


class ResidualFeedback(Feedback):
    """A rule whose memory "residual" is what was not sent of the target."""

    def update_memory(self, target: Tensor, sent: Decoded, memory: Memory) -> Memory:
        return {**memory, "residual": sent.residual_of(target)}


class MaskingFeedback(Feedback):
    """The same with a memory "momentum", of which, if ``masking``, nothing stays where a selector chose."""

    def update_memory(self, target: Tensor, sent: Decoded, memory: Memory) -> Memory:
        momentum = memory["momentum"]
        if self.masking and sent.indices is not None:
            momentum = momentum.index_fill(0, sent.indices, 0.0)
        return {**memory, "momentum": momentum, "residual": sent.residual_of(target)}
