"""State: the memories of a lane between steps.

A lane's memories have declared names and lengths (`StateSpec`). A step reads one generation of them and makes the next;
the commit makes the next one current, so a skipped step changes nothing. Without rollback there is one generation,
and fused kernels change it in place.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs import StateSpec
from gradwire.core import Segments
from gradwire.exchanges.servers import server_slice


@dataclass(eq=False)
class LaneMemory:
    """One generation of a lane's memories, by name. Two are equal only if they are one object."""

    tensors: dict[str, Tensor]


@dataclass
class LaneState:
    """All memories of one lane.

    Attributes:
        current: The memories of the last committed step.
        spare: Storage of the step before, kept for the next one to write to; None where it is not.
        carried_error: An error without a memory, left by an earlier spec; the next step adds it to the gradient.
        observed: Second moments that the training loop measured since the last step.
    """

    current: LaneMemory
    spare: LaneMemory | None = None
    carried_error: Tensor | None = None
    observed: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        return self.current.tensors

    def commit(self, new: LaneMemory, spare: LaneMemory | None = None) -> None:
        """Make the next generation current; ``spare`` is storage for the step after."""
        self.current, self.spare = new, spare
        self.carried_error = self.observed = None

    def keep_(self, new: LaneMemory, memory: str, parts: Iterable[slice]) -> None:
        """Keep the old values of some parts of a memory in the new generation."""
        old, held = self.tensors[memory], new.tensors.get(memory)
        kept = new.tensors[memory] = torch.zeros_like(old) if held is None else held.clone()
        for part in parts:
            kept[part] = old[part]

    def carried_by(self, parts: Sequence[slice]) -> Tensor | None:
        """The carried error of some parameters alone, if there is any."""
        if self.carried_error is None or not parts:
            return None
        left = torch.zeros_like(self.carried_error)
        for part in parts:
            left[part] = self.carried_error[part]
        return left

    def replace(self, tensors: Mapping[str, Tensor]) -> None:
        """Take over memories from elsewhere."""
        self.current, self.spare = LaneMemory(dict(tensors)), None


class Span(NamedTuple):
    """Where a parameter's part of a memory lies: in the live buffer, and within the parameter's own saved vector."""

    live: slice
    own: slice
    length: int


def spans(spec: StateSpec, tensors: Segments, rank: int, world: int) -> dict[str, Span]:
    """The parts of all parameters of a lane in one memory."""
    total = sum(spec.lengths)
    start, stop = server_slice(total, world, rank) if spec.reshard == "shard" else (0, total)
    spans_, at = {}, 0
    for name, n in zip(tensors.names, spec.lengths, strict=True):
        low, high = max(at, start), max(min(at + n, stop), max(at, start))
        spans_[name] = Span(slice(low - start, high - start), slice(low - at, high - at), n)
        at += n
    return spans_


def zeros(
    specs: Mapping[str, StateSpec], tensors: Segments, rank: int, world: int, device: torch.device
) -> dict[str, Tensor]:
    """Memories of zeros, as large as this rank needs them."""
    buffers = {}
    for name, spec in specs.items():
        sizes = [span.live.stop - span.live.start for span in spans(spec, tensors, rank, world).values()]
        buffers[name] = torch.zeros(sum(sizes), device=device)
    return buffers
