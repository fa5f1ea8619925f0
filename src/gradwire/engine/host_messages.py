"""Host messages: what the ranks of one host send each other, dense."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.payload import Payload, as_bytes, from_bytes


class HostMean(NamedTuple):
    """The host's mean gradients of one bucket, for the share of one of its ranks.

    Attributes:
        grads: By name. They are zeros where no rank of the host has a gradient.
        has_grad: uint8 on the device, in the same order: whether any rank has one. None: all have.
        status: uint8[1] on the device: what the ranks of the host report.
    """

    grads: dict[str, Tensor]
    has_grad: Tensor | None
    status: Tensor

    def known(self) -> dict[str, Tensor | None]:
        """The gradients that there are. This waits for the device."""
        if self.has_grad is None:
            return dict(self.grads)
        there = self.has_grad.tolist()
        return {name: x if here else None for (name, x), here in zip(self.grads.items(), there, strict=True)}


def host_message(numbers: Sequence[Tensor], notes: Sequence[Tensor]) -> Payload:
    """Float32 numbers, then bytes."""
    return Payload(torch.cat([*(as_bytes(x.float()) for x in numbers), *notes]))


def read_message(message: Payload, n: int) -> tuple[Tensor, Tensor]:
    return from_bytes(message.data[: 4 * n], torch.float32), message.data[4 * n :]
