"""Layout: how tensors lie in memory. The only module outside of kernels that reads addresses."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import Tensor


def address(x: Tensor) -> int:
    """Where a tensor's first element lies."""
    return x.data_ptr()


def addresses(tensors: Iterable[Tensor]) -> list[int]:
    """The same of several."""
    return [x.data_ptr() for x in tensors]


MemoryLayout: TypeAlias = tuple[tuple[int, tuple[int, ...]], ...]  # the address and the strides of each tensor


def memory_layout(tensors: Iterable[Tensor]) -> MemoryLayout:
    """Where tensors lie."""
    return tuple([(x.data_ptr(), x.stride()) for x in tensors])


def without_gaps(x: Tensor) -> bool:
    """Whether a tensor's elements fill one stretch of memory, in whatever order."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense(x))


def in_memory_order(x: Tensor) -> Tensor:
    """The elements of a tensor without gaps, as a flat view."""
    return x.as_strided((x.numel(),), (1,))


def stretches(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors without gaps as flat views; see `joined_neighbors`."""
    return joined_neighbors(map(in_memory_order, tensors))


def joined_neighbors(parts: Iterable[Tensor]) -> list[Tensor]:
    """Flat tensors; those of one format that lie end to end, in this order, are one."""
    groups: list[list[Tensor]] = []
    for x in parts:
        if groups and groups[-1][-1].dtype == x.dtype and adjacent(groups[-1][-1], x):
            groups[-1].append(x)
        else:
            groups.append([x])
    return [group[0].as_strided((sum(x.numel() for x in group),), (1,)) for group in groups]


def same_memory(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors begin at the same place."""
    return x.data_ptr() == y.data_ptr()


def adjacent(left: Tensor, right: Tensor) -> bool:
    """Whether a contiguous tensor ends where another one of the same storage begins."""
    follows = left.data_ptr() + left.nbytes == right.data_ptr()
    return follows and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()


def end_to_end(parts: Sequence[Tensor]) -> Tensor | None:
    """Flat tensors that lie end to end, as one view; None if they do not."""
    if not all(adjacent(left, right) for left, right in pairwise(parts)):
        return None
    return parts[0].as_strided((sum(part.numel() for part in parts),), (1,))


def laid_out(parts: Sequence[Tensor]) -> Tensor:
    """A copy of flat tensors of one format, end to end. On a GPU one launch copies many, faster than `cat` does."""
    if parts[0].device.type == "cpu" or len(parts) == 1:
        return torch.cat(list(parts))
    sizes = [part.numel() for part in parts]
    out = parts[0].new_empty(sum(sizes))
    torch._foreach_copy_(list(out.split(sizes)), list(parts))
    return out


@dataclass(frozen=True)
class Scattered:
    """A flat vector that lies in several places: flat tensors without gaps, of one format, on one device."""

    parts: tuple[Tensor, ...]

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    def numel(self) -> int:
        return sum(part.numel() for part in self.parts)

    def __getitem__(self, stretch: slice) -> "Flat":
        start, stop, _ = stretch.indices(self.numel())
        ends = accumulate(part.numel() for part in self.parts)
        begins = [(part, end - part.numel()) for part, end in zip(self.parts, ends, strict=True)]
        cut = [part[max(start - at, 0) : max(stop - at, 0)] for part, at in begins]
        parts = [part for part in cut if part.numel()] or cut[:1]
        return Scattered(tuple(parts)) if len(parts) > 1 else parts[0]

    def copy_(self, flat: Tensor) -> "Scattered":
        """Write a vector to where this one lies."""
        torch._foreach_copy_(list(self.parts), list(flat.split([part.numel() for part in self.parts])))
        return self


Flat: TypeAlias = Tensor | Scattered


def in_one_place(x: Flat) -> Tensor:
    """The same vector as a tensor: a copy, if it lies in several places."""
    return x if isinstance(x, Tensor) else torch.cat(x.parts)


def takes_scattered(stage: object) -> bool:
    """Whether a stage takes vectors in several places. A subclass says so itself, since it may override methods."""
    return bool(vars(type(stage)).get("takes_scattered", False))


def joined(parts: Sequence[Tensor]) -> Tensor:
    """Flat tensors end to end: a view if they lie so in memory, else a copy."""
    view = end_to_end(parts)
    return torch.cat(list(parts)) if view is None else view


def rows_of(parts: Sequence[Tensor]) -> Tensor:
    """Equally long flat tensors as a matrix: a view if they lie evenly in one storage, as gathered ones do."""
    first = parts[0]
    starts = [part.storage_offset() for part in parts]
    step = starts[1] - starts[0] if len(starts) > 1 else first.numel()
    even = step >= first.numel() and all(b - a == step for a, b in pairwise(starts))
    storage = first.untyped_storage().data_ptr()
    if even and all(part.untyped_storage().data_ptr() == storage for part in parts):
        return first.as_strided((len(parts), first.numel()), (step, 1))
    return torch.stack(list(parts))
