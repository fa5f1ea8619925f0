"""Stacked nodes: the gossip of all ranks of one process at once, on parameters stacked as rows.

There are no messages: what ranks would decode is computed for all of them together, by the rules of the method and by
the codec's own code over one long buffer. Rows equal those of ranks that exchange messages, bit for bit; the host never
waits for the device within a step. Bytes are counted as messages would have had them.

With ``gamma=auto``, the sums of a window are pooled in the next one and used in the one after that. So they may be
copied to the host while the next window runs, and pooling, which only averages a few numbers, is done for all its steps
at the window's end. States equal those of `auto_gamma` for each rank, bit for bit.
"""

from collections.abc import Sequence
from functools import lru_cache, reduce
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.codecs import Codec, EncodeInput
from gradwire.codecs.addends import dtype_of
from gradwire.core import PER_RANK, Key, by_rank
from gradwire.gossip import auto_gamma
from gradwire.gossip.broadcast import BroadcastRules, NeighborMessages
from gradwire.gossip.centralized import Centralized
from gradwire.gossip.choco import Choco
from gradwire.gossip.gossip import GossipMethod, MixResult, densify
from gradwire.gossip.message import CPU, HEADER, Diverged
from gradwire.gossip.node import Node
from gradwire.topology import Topology


def stackable(method: GossipMethod, codec: Codec, topology: Topology) -> bool:
    """Whether there are rules for all ranks at once, and messages whose length is known beforehand."""
    if isinstance(method, Centralized):
        return True
    if not isinstance(method, BroadcastRules) or (method.stacks_if_static and topology.period > 1):
        return False
    keeps_all = codec.indices is None or codec.indices.drop_overflow is None
    return codec.traits.fixed and keeps_all


class StackedNodes:
    """The nodes of all ranks, as one.

    Attributes:
        nodes: One for each rank. Their memories lie here; `scatter_` hands them back.
        device: Where rows lie.
        memory: By name, [ranks, N].
        moved: How far the last step moved each rank, [ranks].
        first_nonfinite_step: The first step at which parameters were not finite; -1 before.
    """

    memory: dict[str, Tensor]
    moved: Tensor
    first_nonfinite_step: Tensor

    def __init__(self, nodes: Sequence[Node], device: torch.device) -> None:
        self.nodes, self.device, first = nodes, device, nodes[0]
        self.method, self.codec, self.topology = first.method, first.codec, first.topology
        self.units = by_rank([[first.units]] * len(nodes))
        self.auto_gamma: BatchedAutoGamma | None = None
        self.gather()

    @property
    def step(self) -> int:
        return self.nodes[0].step

    # -- a step ----------------------------------------------------------------------------------------------------

    def run(self, x: Tensor) -> Tensor:
        """One step of all ranks: parameters in, parameters out. [ranks, N] -> [ranks, N]."""
        self._check_finite(x)
        result = self._mean(x) if isinstance(self.method, Centralized) else self._broadcast(x)
        self.memory, self.moved = dict(result.memory), (result.x - x).norm(dim=1)
        for node in self.nodes:
            node.step = node.number = node.step + 1
            node.gamma = result.gamma
        return result.x

    def _broadcast(self, x: Tensor) -> MixResult:
        assert isinstance(self.method, BroadcastRules)
        sent = self._decoded(self.method.message(x, self.memory, self.step))
        phase = self.step % self.topology.period
        others = [(c.weights, sent[c.peers]) for c in neighbor_columns(self.topology, phase, x.device)]
        messages = NeighborMessages(sent, own_weights(self.topology, phase, x.device), others)
        result = self.method.update(x, self.memory, messages, self.step)
        if self.auto_gamma is None:
            return result
        assert isinstance(self.method, Choco)
        self.auto_gamma.after_step(self.method.measurement(x, self.memory, messages))
        return result._replace(memory={**result.memory, "gauge": self.auto_gamma.state})

    def _mean(self, x: Tensor) -> MixResult:
        sent = self._decoded(x).to(dtype_of(self.codec))
        total = reduce(torch.add, sent)
        return MixResult((total.float() / len(x)).expand_as(x).contiguous(), self.memory)

    def _decoded(self, target: Tensor) -> Tensor:
        """What receivers decode of every rank's message."""
        flat = target.flatten()
        key = Key(self.nodes[0].seed, self.step, PER_RANK)
        return densify(self.codec.encode(EncodeInput(flat, flat, {}, self.units), key).sent, flat).view_as(target)

    # -- parameters that are not finite ----------------------------------------------------------------------------

    def _check_finite(self, x: Tensor) -> None:
        new = (self.first_nonfinite_step < 0) & ~x.isfinite().all()
        self.first_nonfinite_step = torch.where(new, self.step, self.first_nonfinite_step)
        if x.device.type == "cpu":
            self.check()

    def check(self) -> None:
        """Raise `Diverged` if parameters are no longer finite. On a GPU this waits, so call it now and then."""
        step = int(self.first_nonfinite_step)
        if step >= 0:
            raise Diverged(f"parameters are no longer finite at step {step}; lower the learning rate, or gamma")

    @property
    def message_bytes(self) -> int:
        """The length of a message to a neighbor, its header included."""
        numbers = 0 if self.auto_gamma is None else auto_gamma.METADATA_NUMBERS
        return HEADER.size + 4 * numbers + self.codec.size(self.nodes[0].units)

    # -- between nodes and rows ------------------------------------------------------------------------------------

    def gather(self) -> None:
        """Stack the memories of all nodes."""
        nodes, first = self.nodes, self.nodes[0]
        names = [name for name in first.memory if name != "gauge"]
        self.memory = {name: torch.stack([node.memory[name] for node in nodes]) for name in names}
        self.moved = torch.stack([node.moved.to(self.device) for node in nodes])
        self.first_nonfinite_step = torch.full((), -1, device=self.device)
        if "gauge" in first.memory:
            states = [node.memory["gauge"] for node in nodes]
            self.auto_gamma = BatchedAutoGamma(states, self.topology, self.codec, self.device, self.step)
            self.memory["gauge"] = self.auto_gamma.state

    def scatter_(self) -> None:
        """Write the rows back into the nodes."""
        states = self.auto_gamma.states() if self.auto_gamma is not None else None
        for rank, node in enumerate(self.nodes):
            node.memory = {name: rows[rank].clone() for name, rows in self.memory.items() if name != "gauge"}
            if states is not None:
                node.memory["gauge"] = states[rank]
            node.moved = self.moved[rank]


class BatchedAutoGamma:
    """The automatic gamma of all ranks, from their states after so many steps.

    Attributes:
        state: float64 [ranks, auto_gamma.LENGTH], on the host.
        sums: float64 [ranks, 5], on the device: this window's, so far.
        step: Steps so far.
        unpooled: How many of them ``state`` has not pooled yet; all are of this window.
    """

    def __init__(
        self, states: Sequence[Tensor], topology: Topology, codec: Codec, device: torch.device, step: int
    ) -> None:
        self.topology, self.codec, self.step, self.unpooled = topology, codec, step, 0
        self.state = torch.stack(list(states))
        self.sums = self.state[:, auto_gamma.SUMS].to(device, copy=True)
        self.state[:, auto_gamma.SUMS] = 0.0
        self._copying: tuple[Tensor, torch.cuda.Event | None] | None = None

    def after_step(self, measurement: auto_gamma.Measurement) -> None:
        """Add a step's measurement; at the end of a window, change gamma."""
        self.sums += auto_gamma.inner_products(measurement)
        self.step, self.unpooled = self.step + 1, self.unpooled + 1
        if self.step % auto_gamma.window(self.topology) == 0:
            self._pool_steps()
            for row in self.state:
                auto_gamma.close_window_(row, self.topology, self.codec, self.step)
            self._copying, self.sums = _copy_to_host(self.sums), torch.zeros_like(self.sums)

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
        for _ in range(self.unpooled):
            own = self.state[:, auto_gamma.METADATA]
            received = [(column.weights, own[column.peers]) for column in neighbor_columns(self.topology)]
            self.state[:, auto_gamma.METADATA] = auto_gamma.pool(own, received)
        self.unpooled = 0


def _copy_to_host(sums: Tensor) -> "tuple[Tensor, torch.cuda.Event | None]":
    if sums.device.type != "cuda":
        return sums, None
    host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
    host.copy_(sums, non_blocking=True)
    return host, torch.cuda.current_stream(sums.device).record_event()


class NeighborColumn(NamedTuple):
    """One neighbor of every rank.

    Attributes:
        peers: int64 [ranks].
        weights: float64 [ranks, 1].
    """

    peers: Tensor
    weights: Tensor


@lru_cache(maxsize=64)
def neighbor_columns(topology: Topology, phase: int = 0, device: torch.device = CPU) -> tuple[NeighborColumn, ...]:
    """Neighbors in one round of a period, by rising rank, filled up with the rank itself at weight zero."""
    peers = [sorted(topology.peers(rank, phase).items()) for rank in range(topology.size)]
    most = max(map(len, peers))
    padded = [row + [(rank, 0.0)] * (most - len(row)) for rank, row in enumerate(peers)]
    return tuple(
        NeighborColumn(
            torch.tensor([peer for peer, _ in column], device=device),
            torch.tensor([[weight] for _, weight in column], dtype=torch.float64, device=device),
        )
        for column in zip(*padded, strict=True)
    )


@lru_cache(maxsize=64)
def own_weights(topology: Topology, phase: int, device: torch.device) -> Tensor:
    """The weight that every rank gives itself. -> float64 [ranks, 1]."""
    own = [[1.0 - sum(dict(sorted(topology.peers(r, phase).items())).values())] for r in range(topology.size)]
    return torch.tensor(own, dtype=torch.float64, device=device)
