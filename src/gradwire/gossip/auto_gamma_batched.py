"""Gauges: ``gamma=auto`` of all ranks in one process, which never waits for the device.

What a window measured is pooled in the next one and acted upon in the one after that. So its sums may travel to the
host while the next window runs, and pooling, which only averages small notes, is caught up with at the window's end.
States are those that `gauge` keeps for a rank, bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.gossip import auto_gamma
from gradwire.gossip.neighbor_table import columns
from gradwire.topology import Topology


@dataclass
class Gauges:
    """The gauges of all ranks, row by row.

    Attributes:
        topology: Who hears whom.
        codec: What messages are written in.
        state: float64 [ranks, auto_gamma.LENGTH], on the host.
        sums: float64 [ranks, 5], on the device: this window's, so far.
        pooled: How many steps of this window ``state`` has pooled.
        steps: How many there were.
        before: And before this window.
    """

    topology: Topology
    codec: Codec
    state: Tensor
    sums: Tensor
    pooled: int = 0
    steps: int = 0
    before: int = 0
    _late: "tuple[Tensor, torch.cuda.Event | None] | None" = field(init=False, default=None)

    @staticmethod
    def of(states: Sequence[Tensor], topology: Topology, codec: Codec, device: torch.device, step: int) -> "Gauges":
        """From the states of all ranks after so many steps."""
        rows = torch.stack(list(states))
        steps = step % auto_gamma.window(topology)
        sums = rows[:, auto_gamma.SUMS].to(device, copy=True)
        rows[:, auto_gamma.SUMS] = 0.0
        return Gauges(topology, codec, rows, sums, steps, steps, step - steps)

    def turn(self, seen: auto_gamma.Seen) -> None:
        """Take note of a step."""
        self.sums += auto_gamma.measured(seen)
        self.steps += 1
        if self.steps < auto_gamma.window(self.topology):
            return
        self._catch_up()
        for row in self.state:
            auto_gamma.close_(row, self.topology, self.codec, self.before + self.steps)
        self._late, self.sums = self._sent_off(self.sums), torch.zeros_like(self.sums)
        self.before += self.steps
        self.pooled = self.steps = 0

    def states(self) -> list[Tensor]:
        """Each rank's own, as it would be had it talked."""
        self._catch_up()
        rows = self.state.clone()
        rows[:, auto_gamma.SUMS] = self.sums.cpu()
        return list(rows)

    def _catch_up(self) -> None:
        """Pool as often as there were steps."""
        if self._late is not None:
            sums, arrived = self._late
            if arrived is not None:
                arrived.synchronize()
            self.state[:, auto_gamma.NOTE][:, :-1] = sums.float().double()
            self._late = None
        for _ in range(self.pooled, self.steps):
            notes = self.state[:, auto_gamma.NOTE]
            heard = [(column.weights, notes[column.peers]) for column in columns(self.topology)]
            self.state[:, auto_gamma.NOTE] = auto_gamma.pooled(notes, heard)
        self.pooled = self.steps

    def _sent_off(self, sums: Tensor) -> "tuple[Tensor, torch.cuda.Event | None]":
        if sums.device.type != "cuda":
            return sums, None
        host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
        host.copy_(sums, non_blocking=True)
        return host, torch.cuda.current_stream(sums.device).record_event()
