"""Workers: those of one process, which all compute with one model, each with batch-norm statistics of its own.

`sync_workers` also share the parameters of the model; of `gossip_workers` each has its own.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import torch
from torch import Tensor, nn

from gradwire.core.segments import Segments
from gradwire.engine.drive import Clock
from gradwire.integrations.model import trainable
from gradwire_lab.train.rank_info import RankInfo

Grads = dict[str, Tensor | None]


class Workers(ABC):
    """Workers of one process.

    Attributes:
        parameters: Those of the model that are trained, by name.
        stacked_buffers: The buffers that a checkpoint holds, by name, [workers, ...].
        buffers: The same of each worker: views.
        scaler: Scales the loss.
        local_clip: The longest gradient that a worker may have before it is exchanged; 0: any.
        zero_missing: Whether a parameter without a gradient counts as one with a gradient of zero.
    """

    scaler: torch.amp.GradScaler | None = None
    local_clip = 0.0
    zero_missing = False

    def __init__(self, model: nn.Module, rank_info: RankInfo) -> None:
        self.model, self.rank_info = model, rank_info
        self.parameters = trainable(model.named_parameters())
        saved, count = model.state_dict(), len(rank_info.ranks)
        own = {name: buffer for name, buffer in model.named_buffers() if name in saved}
        # One worker has the model's own, which an elastic gossip handle changes in place.
        self.stacked_buffers = {
            name: x[None] if count == 1 else x.expand(count, *x.shape).clone() for name, x in own.items()
        }
        self.buffers = [{name: x[i] for name, x in self.stacked_buffers.items()} for i in range(count)]
        parts = {name: name.rpartition(".") for name in own}
        self._homes = {name: (model.get_submodule(prefix), key) for name, (prefix, _, key) in parts.items()}
        self.use_buffers(self.buffers[0])

    def use_buffers(self, buffers: Mapping[str, Tensor]) -> None:
        """Let the model use these; the tensors themselves, not copies."""
        for name, (module, key) in self._homes.items():
            setattr(module, key, buffers[name])

    @abstractmethod
    def select(self, worker: int) -> None:
        """Let the model be that of one worker."""

    @abstractmethod
    def leaves(self, copies: int) -> dict[str, Tensor]:
        """Parameters to derive by, [copies, ...]."""

    @abstractmethod
    def gradient_rows(self) -> tuple[Sequence[Segments], Sequence[Tensor]]:
        """Where gradients are wanted: tables of parameters, and for each a tensor [workers, N]."""

    @abstractmethod
    def sum_over_processes(self, numbers: Tensor) -> tuple[Tensor, int]:
        """The sum over all processes that can be reached, uncounted, and how many workers they have."""

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over all processes."""
        return self.sum_over_processes(numbers)[0]

    def mean(self, numbers: Tensor) -> Tensor:
        """The mean over all workers, of the sums over those of each process."""
        total, count = self.sum_over_processes(numbers)
        return total / count

    def first(self, x: Tensor) -> Tensor:
        """The tensor of the process with the first worker; where that may have died, of this one."""
        if self.rank_info.rendezvous is not None:
            return x.clone()
        return self.total(x.clone() if self.rank_info.first else torch.zeros_like(x))

    def mean_loss(self, loss: Tensor) -> float:
        """The mean over all workers of a loss that is a mean over those of this process."""
        return (loss if self.rank_info.simulated else self.mean(loss)).item()

    def mean_buffers(self) -> dict[str, Tensor]:
        """Means over all workers; of counters, which are no floats, those of the first one."""
        return {
            name: self.mean(rows.double().sum(0)).to(rows.dtype) if rows.is_floating_point() else self.first(rows[0])
            for name, rows in self.stacked_buffers.items()
        }

    def barrier(self) -> None:
        """Wait for all processes."""
        self.total(torch.zeros(1, device=self.rank_info.device)).item()

    # -- scaling of the loss ---------------------------------------------------------------------------------------

    def scaled(self, loss: Tensor) -> Tensor:
        return loss if self.scaler is None else self.scaler.scale(loss)

    @property
    def loss_scale(self) -> Tensor | float:
        """What the loss is multiplied by, still on the device."""
        return 1.0 if self.scaler is None else self.scaler._get_scale_async()  # type: ignore[return-value]


def views(table: Segments, rows: Tensor) -> dict[str, Tensor]:
    """Each parameter's part of vectors [..., N]: views [..., *shape]."""
    parts = zip(table.names, table.shapes, rows.split(list(table.lengths), dim=-1), strict=True)
    return {name: part.view((*rows.shape[:-1], *shape)) for name, shape, part in parts}


def account(sent: float, received: float, payload: float, dense: float, ring: float, clock: Clock) -> dict[str, float]:
    """Fields of a record: bytes and seconds of one worker; ``ring``: what float32 ring all-reduces would have sent."""
    return {
        "sent": sent,
        "received": received,
        "payload": payload,
        "dense": dense,
        "payload_ratio": dense / payload if payload else math.inf,
        "ring": ring,
        "wire_ratio": ring / sent if sent else math.inf,
        **{f"{name}_seconds": seconds for name, seconds in asdict(clock).items()},
    }
