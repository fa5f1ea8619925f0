"""Staging: a buffer of a bucket's own, for gradients that come to another address in every step.

Captured work reads gradients in the buffer, and leaves their updates there. Those are copied back to where gradients
lie; or, where an integration can replace the memory of a gradient, the gradients become views of the buffer before the
step, as DDP's `gradient_as_bucket_view` makes them, and nothing is copied back.

A training loop may keep such a view beyond its step. Views have a storage of their own over the same memory. Its count
of references tells the next step whether anything besides the gradients still refers to it. If so, the bucket takes
another buffer. Where torch does not tell the count, updates are copied back.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack, to_dlpack  # type: ignore[attr-defined]

from gradwire.core.layout import address, addresses
from gradwire.engine.gradients import Grads
from gradwire.engine.views import GradViews

_ALIGNMENT = 128  # elements; lanes begin at multiples, as if each had an allocation of its own


@dataclass
class Staging:
    """The buffer of one bucket.

    Attributes:
        names: Of its parameters.
        views: By lane: where captured work finds gradients.
        allows_views: Whether gradients may become views of the buffer: they are what it holds, float32.
    """

    names: tuple[str, ...]
    views: list[GradViews]
    allows_views: bool
    _flat: Tensor
    _handed_out: StorageWeakRef | None = field(default=None, init=False)  # the storage of the latest views
    _references: int = field(default=0, init=False)  # to that storage, when they were handed out

    def __post_init__(self) -> None:
        self._places = [x for view in self.views for x in view.grads]
        self._addresses = addresses(self._places)
        self._cuts: list[tuple[int, torch.Size | None]] = []  # lengths and shapes; no shape: between two lanes
        starts = [*(x.storage_offset() for x in self._places), self._flat.numel()]
        for x, (start, after) in zip(self._places, pairwise(starts), strict=True):
            gap = int(after - start - x.numel())
            self._cuts += [(x.numel(), x.shape), (gap, None)] if gap else [(x.numel(), x.shape)]

    @classmethod
    def of(cls, names: Sequence[str], lanes: Sequence[GradViews], device: torch.device) -> "Staging":
        """A buffer for gradients like these, lane after lane, end to end in each, in float32."""
        lengths = [[x.numel() for x in lane.grads] for lane in lanes]
        sizes = [-(-sum(some) // _ALIGNMENT) * _ALIGNMENT for some in lengths]
        flat = torch.empty(sum(sizes), device=device)
        views = []
        for part, some, lane in zip(flat.split(sizes), lengths, lanes, strict=True):
            parts = part[: sum(some)].split(some)
            views.append(GradViews([y.view(x.shape) for x, y in zip(lane.grads, parts, strict=True)], device))
        counted = hasattr(torch._C, "_storage_Use_Count")
        return cls(tuple(names), views, counted and all(lane.in_place for lane in lanes), flat)

    def fill(self, grads: Grads) -> None:
        """Copy gradients to the buffer, but for those that are views of it."""
        places, sources = self._elsewhere(grads)
        if places:
            torch._foreach_copy_(places, sources)

    def copy_back(self, grads: Grads, updates: dict[str, Tensor]) -> None:
        """Copy updates to where gradients lie, but for those that are views of the buffer. They are noted."""
        known = {name: updates[name] for name in self.names if name in updates}
        into = {name: detached(grads[name]) for name in known if grads[name] is not None}
        away = [name for name, x in into.items() if address(x) != address(known[name])]
        if away:
            torch._foreach_copy_([into[name] for name in away], [known[name] for name in away])
            updates |= {name: into[name] for name in away}

    def is_free(self, grads: Grads) -> bool:
        """Whether nothing refers to the last views but these gradients, which then all are such views."""
        if self._handed_out is None or self._handed_out.expired():
            return True
        alone = bool(torch._C._storage_Use_Count(self._handed_out.cdata) == self._references)
        return alone and not self._elsewhere(grads)[0]

    def take_in(self, grads: Grads) -> list[Tensor] | None:
        """Fill the buffer, and return views of it that are to take the places of the gradients, in order of names.

        None: the gradients are such views already. Nothing else may refer to views, which `is_free` tells.
        """
        places, sources = self._elsewhere(grads)
        if not places:
            return None
        torch._foreach_copy_(places, sources)
        base = from_dlpack(to_dlpack(self._flat))
        self._handed_out = StorageWeakRef(base.untyped_storage())
        parts = torch.unsafe_split_with_sizes(base, [n for n, _ in self._cuts])
        pairs = zip(parts, (shape for _, shape in self._cuts), strict=True)
        views = [x if len(shape) == 1 else x.view(shape) for x, shape in pairs if shape is not None]
        del base, parts, pairs  # which still count if views refer to them, as torch decides
        self._references = torch._C._storage_Use_Count(self._handed_out.cdata)
        return views

    def _elsewhere(self, grads: Grads) -> tuple[list[Tensor], list[Tensor]]:
        """Places of gradients that are no views of the buffer, and those gradients."""
        mine = [x if x is not None and not x.requires_grad else detached(x) for x in map(grads.__getitem__, self.names)]
        away = [i for i, (at, place) in enumerate(zip(addresses(mine), self._addresses, strict=True)) if at != place]
        return [self._places[i] for i in away], [mine[i] for i in away]


def detached(grad: Tensor | None) -> Tensor:
    """A gradient that must exist, detached from autograd."""
    assert grad is not None
    return grad.detach() if grad.requires_grad else grad
