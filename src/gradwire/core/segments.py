"""Segments: how named tensors lie one after another in a flat buffer.

A *segment* is what a codec treats as one vector: it has its own top-k budget, its own scale. Layer-wise, bucket and
entire-model compression are the same code over different segment tables.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from gradwire.core.graph_refs import cached_on_device
from gradwire.core.keys import qualified

_known: Any = WeakTensorKeyDictionary()


@dataclass(frozen=True)
class Segments:
    """A table of named, shaped pieces of one flat buffer, in memory order.

    Attributes:
        names: Of the segments.
        shapes: Likewise.
        merged_from: The shapes of what was merged into one, for coders that use them.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    merged_from: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        assert len(self.names) == len(self.shapes)

    @classmethod
    def single(cls, n: int, name: str = "x") -> "Segments":
        """One nameless vector of ``n`` elements: the table of a lone tensor."""
        return cls((name,), ((n,),))

    @cached_property
    def lengths(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def offsets(self) -> tuple[int, ...]:
        """Where each segment starts, and where the last one ends."""
        return (0, *accumulate(self.lengths))

    @property
    def total(self) -> int:
        return self.offsets[-1]

    def __len__(self) -> int:
        return len(self.names)

    def merged(self) -> "Segments":
        """The same buffer seen as one vector, named after all it holds."""
        return Segments(("+".join(self.names),), ((self.total,),), self.merged_from or self.shapes)

    @cached_property
    def rows(self) -> tuple[tuple[int, int], ...]:
        """How many rows there are, and how wide, tensor by tensor; a row is all that belongs to one output."""
        return tuple(matrix_shape(shape) for shape in self.merged_from or self.shapes)

    def slices(self) -> dict[str, slice]:
        """Where each name lies."""
        ends = self.offsets[1:]
        return {name: slice(a, b) for name, a, b in zip(self.names, self.offsets[:-1], ends, strict=True)}

    def window(self, start: int, stop: int) -> "Segments":
        """The part of the table inside ``[start, stop)``; cut segments are named by what is left of them.

        All of it is the table itself, with its empty segments: so encoders have it that take the whole buffer.
        """
        return self if (start, stop) == (0, self.total) else _window(self, start, stop)

    def lengths_on(self, device: torch.device) -> Tensor:
        """The lengths as an int64 tensor."""
        return on(self.lengths, device)

    def offsets_on(self, device: torch.device) -> Tensor:
        """The offsets, end included, as an int64 tensor."""
        return on(self.offsets, device)


def by_rank(tables: Sequence[Sequence[Segments]]) -> Segments:
    """The segments of several ranks end to end, each named after its rank."""
    names = [qualified(name, rank) for rank, own in enumerate(tables) for table in own for name in table.names]
    return Segments(tuple(names), tuple(shape for own in tables for table in own for shape in table.shapes))


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix, its first dimension by the rest; a vector is one row."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


@lru_cache(maxsize=256)
def _window(table: Segments, start: int, stop: int) -> Segments:
    names, shapes = [], []
    for name, a, b in zip(table.names, table.offsets[:-1], table.offsets[1:], strict=True):
        lo, hi = max(a, start), min(b, stop)
        if lo < hi:
            whole = (lo, hi) == (a, b)
            names.append(name if whole else f"{name}[{lo - a}:{hi - a}]")
            shapes.append((hi - lo,))
    return Segments(tuple(names), tuple(shapes))


@cached_on_device(256)
def on(numbers: tuple[float, ...], device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Numbers of a table as a tensor. It is cached, so it must not be written into."""
    return torch.tensor(numbers, dtype=dtype, device=device)


def known(lengths: Tensor) -> tuple[int, ...]:
    """The numbers in a table of lengths. Reading them waits for the device, so each table is read only once."""
    entry = _known.get(lengths)
    if entry is None or entry[0] != lengths._version:
        entry = lengths._version, tuple(lengths.tolist())
        _known[lengths] = entry
    numbers: tuple[int, ...] = entry[1]
    return numbers
