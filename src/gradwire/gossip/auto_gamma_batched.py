"""Automatic gamma of all ranks in one process, without waiting for the device.

The sums of a window are pooled in the next one and used in the one after that. So they may be copied to the host while
the next window runs, and pooling, which only averages a few numbers, is done for all its steps at the window's end.
States equal those of `auto_gamma` for each rank, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.gossip import auto_gamma
from gradwire.gossip.neighbor_table import neighbor_columns
from gradwire.topology import Topology


@dataclass
class BatchedAutoGamma:
    """The states of all ranks, row by row.

    Attributes:
        topology: The mixing weights.
        codec: What messages are encoded with.
        state: float64 [ranks, auto_gamma.LENGTH], on the host.
        sums: float64 [ranks, 5], on the device: this window's, so far.
        pooled: How many steps of this window ``state`` has pooled.
        steps: Steps of this window so far.
        before: Steps before this window.
    """

    topology: Topology
    codec: Codec
    state: Tensor
    sums: Tensor
    pooled: int = 0
    steps: int = 0
    before: int = 0
    _copying: "tuple[Tensor, torch.cuda.Event | None] | None" = field(init=False, default=None)

    @staticmethod
    def of(
        states: Sequence[Tensor], topology: Topology, codec: Codec, device: torch.device, step: int
    ) -> "BatchedAutoGamma":
        """From the states of all ranks after so many steps."""
        rows = torch.stack(list(states))
        steps = step % auto_gamma.window(topology)
        sums = rows[:, auto_gamma.SUMS].to(device, copy=True)
        rows[:, auto_gamma.SUMS] = 0.0
        return BatchedAutoGamma(topology, codec, rows, sums, steps, steps, step - steps)

    def after_step(self, measurement: auto_gamma.Measurement) -> None:
        """Add a step's measurement; at the end of a window, change gamma."""
        self.sums += auto_gamma.inner_products(measurement)
        self.steps += 1
        if self.steps < auto_gamma.window(self.topology):
            return
        self._pool_steps()
        for row in self.state:
            auto_gamma.close_window_(row, self.topology, self.codec, self.before + self.steps)
        self._copying, self.sums = _copy_to_host(self.sums), torch.zeros_like(self.sums)
        self.before += self.steps
        self.pooled = self.steps = 0

    def states(self) -> list[Tensor]:
        """Each rank's own, as `auto_gamma` would have it."""
        self._pool_steps()
        rows = self.state.clone()
        rows[:, auto_gamma.SUMS] = self.sums.cpu()
        return list(rows)

    def _pool_steps(self) -> None:
        """Pool once for each step of this window that was not pooled yet."""
        if self._copying is not None:
            sums, arrived = self._copying
            if arrived is not None:
                arrived.synchronize()
            self.state[:, auto_gamma.METADATA][:, :-1] = sums.float().double()
            self._copying = None
        for _ in range(self.pooled, self.steps):
            own = self.state[:, auto_gamma.METADATA]
            received = [(column.weights, own[column.peers]) for column in neighbor_columns(self.topology)]
            self.state[:, auto_gamma.METADATA] = auto_gamma.pool(own, received)
        self.pooled = self.steps


def _copy_to_host(sums: Tensor) -> "tuple[Tensor, torch.cuda.Event | None]":
    if sums.device.type != "cuda":
        return sums, None
    host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
    host.copy_(sums, non_blocking=True)
    return host, torch.cuda.current_stream(sums.device).record_event()
