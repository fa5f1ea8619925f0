"""What a kernel is timed on: segments, and the buffers that cases share."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.kernels.select import share

RATIO = 0.001
WORLD = 8

Run = Callable[[], object]


class Case(NamedTuple):
    """One thing to time.

    Attributes:
        bytes: What it cannot avoid reading and writing, for each element.
        run: Does it once.
        repeatable: Whether a graph of it may be replayed.
        composed: Whether it is plain torch, and has no other definition to be compared with.
    """

    bytes: float
    run: Run
    repeatable: bool = True
    composed: bool = False


@dataclass(frozen=True)
class KernelInputs:
    """Buffers that cases share, made when the first asks for them.

    Attributes:
        lengths: Of the segments.
        device: Where all is.
    """

    lengths: tuple[int, ...]
    device: torch.device

    @property
    def n(self) -> int:
        return sum(self.lengths)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, range(len(self.lengths))))

    @cached_property
    def table(self) -> Tensor:
        return torch.tensor(self.lengths, device=self.device)

    @cached_property
    def x(self) -> Tensor:
        return self.normal()

    @cached_property
    def messages(self) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Values and random positions of several ranks, and where each rank's begin."""
        k = sum(self.counts(RATIO))
        places = [torch.randint(self.n, (k,), device=self.device).unique() for _ in range(WORLD)]
        bounds = (0, *torch.tensor([p.numel() for p in places]).cumsum(0).tolist())
        return torch.randn(bounds[-1], device=self.device), torch.cat(places), bounds

    def counts(self, ratio: float) -> tuple[int, ...]:
        return tuple(share(ratio, length) for length in self.lengths)

    def normal(self, scale: float = 1.0, filled: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
        """Gaussian entries, of which only a share is not zero."""
        x = scale * torch.randn(self.n, device=self.device)
        if filled < 1:
            x *= torch.rand(self.n, device=self.device) < filled
        return x.to(dtype)

    def positions(self) -> Tensor:
        """Those of the first rank."""
        _, indices, bounds = self.messages
        return indices[: bounds[1]]


def on_memory(needed: float, encode: Callable[..., object], memory: Tensor, lane: bool) -> Case:
    """A kernel ``encode(memory)`` in place; or ``encode(new, old)``, as a lane keeps memories until it commits."""
    if not lane:
        return Case(needed, lambda: encode(memory))
    spare = torch.empty_like(memory)

    def commit() -> None:
        nonlocal memory, spare
        encode(spare, memory)
        memory, spare = spare, memory

    return Case(needed, commit, False)


Make = Callable[[KernelInputs], Case]
