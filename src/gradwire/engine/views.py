"""Views: where the gradients of a lane lie. They are read there, and the update is written to the same place."""

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs.decoding import Entries
from gradwire.core.layout import adjacent, end_to_end, laid_out, same_memory
from gradwire.kernels import fused

LONG_RUN = 2**17  # elements: shorter runs are read faster once they are laid end to end


class ContiguousRun(NamedTuple):
    """Neighboring parameters that are neighbors in memory too.

    Attributes:
        start: Where the run begins in the lane's vector.
        flat: Its entries.
        lengths: Of its parameters.
    """

    start: int
    flat: Tensor
    lengths: tuple[int, ...]


class GradViews:
    """The gradients of one lane, one tensor for each of its parameters, in lane order.

    Args:
        grads: Dense tensors of any shape, format and device; the update is written over them.
        device: Where the lane computes.
        factor: What gradients are multiplied by first.
        has_grad: By parameter: whether this rank has a gradient, or zeros stand for it.
    """

    def __init__(
        self, grads: Sequence[Tensor], device: torch.device, factor: float = 1.0, has_grad: Sequence[bool] = ()
    ) -> None:
        self.grads = [grad.detach() for grad in grads]
        self.device, self.factor = device, factor
        self.has_grad = tuple(has_grad) or (True,) * len(self.grads)
        self._copy: Tensor | None = None  # gradients end to end, where that took a copy

    @cached_property
    def in_place(self) -> bool:
        """Whether gradients can be read and overwritten as the flat vectors that they are."""
        plain = all(x.is_contiguous() and x.dtype == torch.float32 and x.device == self.device for x in self.grads)
        return plain and self.factor == 1.0

    @property
    def common_dtype(self) -> torch.dtype:
        """The 16-bit format that all gradients have, else float32."""
        formats = {x.dtype for x in self.grads}
        only = formats.pop() if len(formats) == 1 else torch.float32
        return only if only in (torch.float16, torch.bfloat16) and self.factor == 1.0 else torch.float32

    def flat(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The gradients end to end."""
        parts = [x.reshape(-1).to(self.device, dtype).contiguous() for x in self.grads]
        view = end_to_end(parts)
        if view is None or not self.in_place:
            self._copy = laid_out(parts) if view is None else view
        flat = self._copy if view is None else view
        assert flat is not None
        if self.factor != 1.0:
            flat = self._copy = flat * self.factor
        return flat

    def contiguous(self) -> Tensor | None:
        """The gradients where they lie, if that is end to end."""
        return end_to_end([x.view(-1) for x in self.grads]) if self.in_place else None

    def free_copy(self) -> None:
        """Free the copy that was encoded: a dense update is not written there."""
        self._copy = None

    def runs(self) -> list[ContiguousRun]:
        """The gradients where they lie, if the average run is long; else one run of a copy."""
        if self.in_place:
            runs = self._runs()
            if len(runs) == 1 or sum(run.flat.numel() for run in runs) >= LONG_RUN * len(runs):
                return runs
        return [ContiguousRun(0, self.flat(), tuple(x.numel() for x in self.grads))]

    def _runs(self) -> list[ContiguousRun]:
        groups: list[list[Tensor]] = []
        for part in (x.view(-1) for x in self.grads):
            if groups and adjacent(groups[-1][-1], part):
                groups[-1].append(part)
            else:
                groups.append([part])
        runs, start = [], 0
        for group in groups:
            flat = end_to_end(group)
            assert flat is not None
            runs.append(ContiguousRun(start, flat, tuple(part.numel() for part in group)))
            start += flat.numel()
        return runs

    def write_(self, update: Tensor | Entries) -> None:
        """Write the update over the gradients: of entries, their mean over the ranks that have sent any."""
        if isinstance(update, Entries):
            runs = self.runs() if self._copy is None and self.device.type == "cpu" else self._runs_of_copy()
            for run in runs:
                fused.scatter_mean_(run.flat, *update, run.start, len(update.bounds) - 1)
            if len(runs) > 1:
                return
            update = runs[0].flat
        if same_memory(update, self.grads[0]):
            return
        parts = update.split([x.numel() for x in self.grads])
        torch._foreach_copy_(self.grads, [part.view(x.shape) for part, x in zip(parts, self.grads, strict=True)])

    def _runs_of_copy(self) -> list[ContiguousRun]:
        """One run: the copy that was encoded, or the gradients where they lie end to end."""
        flat = self.flat() if self._copy is None else self._copy.float()
        return [ContiguousRun(0, flat, (flat.numel(),))]

    def zero_(self) -> None:
        """Overwrite the gradients with zeros: the step was skipped."""
        torch._foreach_zero_(self.grads)


def zero_nonfinite(flat: Tensor, ranks: int = 1) -> tuple[Tensor, Tensor]:
    """The gradients of so many ranks, with zeros for each that has an entry not finite; and whether there was one.

    What is encoded of it will be skipped by all ranks.
    """
    if flat.device.type == "cpu" and torch.isfinite(flat.sum()):  # then all are, which is slow to see one by one
        return flat, torch.tensor(False)
    rows = flat.view(ranks, -1)
    # The largest magnitude tells in one pass, where `isfinite` of every entry takes five.
    fine = torch.isfinite(torch.linalg.vector_norm(rows, torch.inf, 1)) if flat.numel() else rows.new_ones(ranks).bool()
    nonfinite = ~fine.all()
    if flat.device.type == "cpu" and not nonfinite:  # on another device, looking would mean waiting
        return flat, nonfinite
    return torch.where(fine[:, None], rows, 0.0).view(-1), nonfinite
