"""Views: where the gradients of a lane lie. They are read there, and the update is written to the same place."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from gradwire.codecs import Entries
from gradwire.core.layout import Flat, Scattered, end_to_end, joined_neighbors, laid_out, same_memory
from gradwire.kernels import fused
from gradwire.kernels.dispatch import offers


class GradViews:
    """The gradients of one lane, one tensor for each of its parameters, in lane order.

    Args:
        grads: Dense tensors of any shape, format and device; the update is written over them.
        device: Where the lane computes.
        factor: What gradients are multiplied by first.
        has_grad: By parameter: whether this rank has a gradient, or zeros stand for it.
        stays: Whether gradients come to the same addresses in all steps, so that a table of these is worth making.
    """

    def __init__(
        self,
        grads: Sequence[Tensor],
        device: torch.device,
        factor: float = 1.0,
        has_grad: Sequence[bool] = (),
        stays: bool = False,
    ) -> None:
        self.grads = [grad.detach() for grad in grads]
        self.device, self.factor, self.stays = device, factor, stays
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

    def lying(self) -> Flat | None:
        """The gradients where they lie: end to end, or in several places if kernels take them. None: a copy serves."""
        if not self.in_place:
            return None
        parts = [x.view(-1) for x in self.grads]
        flat = end_to_end(parts)
        return Scattered(tuple(joined_neighbors(parts))) if flat is None and self._takes_scattered else flat

    @property
    def _takes_scattered(self) -> bool:
        """Kernels of a GPU read a table of addresses, which is worth making for gradients that stay there."""
        return offers(self.device.type, "places") or (self.stays and self.device.type == "cuda")

    def free_copy(self) -> None:
        """Free the copy that was encoded: a dense update is not written there."""
        self._copy = None

    def vector(self, on_gpu: bool = False, widened: bool = False) -> Flat:
        """The gradients as kernels take them.

        Args:
            on_gpu: Whether the kernel takes a vector in several places on a GPU, too; those of a CPU do.
            widened: Whether it takes float32 alone; others of a CPU take 16-bit gradients as they are.
        """
        on_cpu = self.device.type == "cpu"
        there = self.lying() if on_cpu or on_gpu else None
        return self.flat(self.common_dtype if on_cpu and not widened else torch.float32) if there is None else there

    def write_(self, update: Flat | Entries) -> None:
        """Write the update over the gradients, unless it lies there: of entries, their mean over those who sent."""
        if isinstance(update, Entries):
            there = self.lying()
            there = self._encoded() if there is None else there
            fused.scatter_mean_(there, *update, update.ranks)
            update = there
        if isinstance(update, Scattered) or same_memory(update, self.grads[0]):
            return
        parts = update.split([x.numel() for x in self.grads])
        torch._foreach_copy_(self.grads, [part.view(x.shape) for part, x in zip(parts, self.grads, strict=True)])

    def _encoded(self) -> Tensor:
        """The copy that was encoded, or the gradients where they lie end to end."""
        return self.flat() if self._copy is None else self._copy.float()

    def zero_(self) -> None:
        """Overwrite the gradients with zeros: the step was skipped."""
        torch._foreach_zero_(self.grads)


def zero_nonfinite(flat: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients, with zeros for entries that are not finite; and whether there was one.

    What is encoded of them will be skipped by all ranks.
    """
    if flat.device.type == "cpu" and torch.isfinite(flat.sum()):  # then all are, which is slow to see one by one
        return flat, torch.tensor(False)
    return fused.finite_or_zero(flat)
