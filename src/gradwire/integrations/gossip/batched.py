"""Batched gossip: all replicas of a group in this process, as rows of one tensor."""

import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gradwire.comm.collectives import AllReduceOp, Traffic, traffic
from gradwire.engine.drive import Clock, interleave
from gradwire.engine.lockstep import Lockstep
from gradwire.gossip import GossipMethod
from gradwire.gossip.centralized import Centralized
from gradwire.gossip.stacked import StackedNodes, stackable
from gradwire.integrations.gossip.checkpoint import check_state, load_state, save_state
from gradwire.integrations.gossip.flat_params import CodecSpec, FlatParams, describe, handle_repr, make_node
from gradwire.integrations.gossip.report import GossipReport, summarize


class BatchedGossip:
    """Gossips ``world`` replicas of one model. They start as the model is.

    Where the method has rules for all ranks at once, see `gossip.stacked`; else ranks exchange messages in lockstep.

    Attributes:
        nodes: Each replica's gossip state.
        hosts: The ranks of each node; by default one.
        clock: The time of all replicas, as encoding.
        traffic: Of each node.
    """

    elastic = False
    resyncs = 0

    def __init__(
        self,
        model: nn.Module,
        world: int,
        spec: str | GossipMethod,
        codec: CodecSpec | None = None,
        *,
        granularity: str = "layer",
        overlap: bool = False,
        seed: int = 0,
        hosts: tuple[tuple[int, ...], ...] | None = None,
        stacked: bool = True,
    ) -> None:
        self.flat = FlatParams(model)
        self.nodes = [make_node(self.flat, spec, codec, r, world, granularity, seed, overlap) for r in range(world)]
        first = self.nodes[0]
        self.description, self.clock = describe(first, granularity), Clock()
        common = self.flat.read()
        for node in self.nodes:
            node.begin(common)
        self.hosts = tuple((rank,) for rank in range(world)) if hosts is None else hosts
        self._members = (
            None if hosts is None else torch.tensor(hosts, device=self.flat.device)
        )  # [nodes, ranks of each]
        numbers = {rank: number for number, host in enumerate(self.hosts) for rank in host}
        self._node_of = [numbers[rank] for rank in range(len(numbers))]
        self.pending: Tensor | None = None  # with overlap: what the last round adds to the next parameters
        self.traffic = [Traffic() for _ in range(world)]
        self._costs: dict[int, list[Traffic]] = {}  # by round of the graph's period
        fits = stacked and stackable(first.method, first.codec, first.topology)
        self._stack = StackedNodes(self.nodes, self.flat.device) if fits else None
        self._group = Lockstep(world)

    def __repr__(self) -> str:
        return handle_repr(self, self.description, self.nodes[0], self.step)

    # -- a round -------------------------------------------------------------------------------------------------------

    def mix(self, x: Tensor) -> Tensor:
        """One round on parameters in the order of ``model.named_parameters()``. [nodes, N] -> [nodes, N]."""
        began = time.perf_counter()
        if not self.nodes[0].overlap:
            x = self._round(x)
        else:
            x = x if self.pending is None else x + self.pending
            self.pending = self._round(x) - x
        self.clock.encode += time.perf_counter() - began
        return x

    def mix_rows(self, rows: Tensor) -> Tensor:
        """One round on the ranks' parameters; those of a node are equal. [ranks, N] -> [ranks, N]."""
        if self._members is None:
            return self.mix(rows)
        return self.mix(rows[self._members[:, 0]])[self._node_of]

    def average_rows(self, grads: Tensor) -> Tensor:
        """Gradients, averaged inside each node. [ranks, N] -> [ranks, N]."""
        if self._members is None:
            return grads
        return (grads[self._members].sum(1) / self._members.shape[1])[self._node_of]

    def _round(self, x: Tensor) -> Tensor:
        if self._stack is not None:
            phase = self._stack.step % self._stack.topology.period
            if phase not in self._costs:
                self._costs[phase] = [_cost(self._stack, rank, phase) for rank in range(len(self.nodes))]
            self.traffic = [old + new for old, new in zip(self.traffic, self._costs[phase], strict=True)]
            return self._stack.run(x)
        decoded: dict[tuple[int, int], Tensor] = {}
        rows = [row.clone() for row in x]  # placed in memory as a lone rank's: some sums depend on it
        protocols = [interleave([node.run(row, decoded=decoded)]) for node, row in zip(self.nodes, rows, strict=True)]
        self._group.traffic = self.traffic
        mixed = torch.stack([result[0] for result in self._group.drive(protocols)])
        self.traffic = self._group.traffic
        return mixed

    def check(self) -> None:
        """Raise `Diverged` if parameters are no longer finite. On a GPU this waits for it."""
        if self._stack is not None:
            self._stack.check()

    def close(self) -> None:
        """There is nothing to leave."""

    @property
    def step(self) -> int:
        return self.nodes[0].step if self._stack is None else self._stack.step

    @property
    def gamma(self) -> float:
        return self.nodes[0].gamma if self._stack is None else self._stack.gamma

    # -- over all ranks, state and report ------------------------------------------------------------------------------

    def sum_over_processes(self, numbers: Tensor) -> tuple[Tensor, int]:
        """The numbers themselves: there is one process; and how many ranks it has."""
        return numbers, sum(map(len, self.hosts))

    def max_over_processes(self, number: float) -> float:
        """The number itself: there is one process."""
        return number

    def report(self, rank: int = 0) -> GossipReport:
        """The report of one rank's node."""
        self._scatter()
        number = self._node_of[rank]
        return summarize(self.nodes[number], self.traffic[number], len(self.nodes))

    def state_dict(self) -> list[dict[str, Tensor]]:
        """One state for each node, as real ranks would save them."""
        self._scatter()
        return [save_state(node, self.flat, self.description, len(self.nodes)) for node in self.nodes]

    def load_state_dict(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        if len(states) != len(self.nodes):
            raise ValueError(f"there are {len(states)} states for {len(self.nodes)} replicas; pass one for each")
        for node, state in zip(self.nodes, states, strict=True):
            check_state(state, node, self.flat, self.description, len(self.nodes))
        for node, state in zip(self.nodes, states, strict=True):
            load_state(node, state)
        pending = [node.pending for node in self.nodes if node.pending is not None]
        self.pending = torch.stack(pending) if pending else None
        for node in self.nodes:
            node.pending = None
        if self._stack is not None:
            self._stack.gather()

    def state_dicts(self) -> list[dict[str, Tensor]]:
        """The state of each rank's node."""
        states = self.state_dict()
        return [states[number] for number in self._node_of]

    def load_state_dicts(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        self.load_state_dict([states[host[0]] for host in self.hosts])

    def counters(self) -> list[list[float]]:
        """Bytes sent and received, and collectives, of each rank's node."""
        counts = [self.traffic[number] for number in self._node_of]
        return [[count.sent, count.received, count.collectives] for count in counts]

    def load_counters(self, counters: Sequence[Sequence[float]]) -> None:
        firsts = [counters[host[0]] for host in self.hosts]
        self.traffic = [Traffic(sent, received, int(collectives)) for sent, received, collectives in firsts]

    def _scatter(self) -> None:
        if self._stack is not None:
            self._stack.scatter_()
        for rank, node in enumerate(self.nodes):
            node.pending = None if self.pending is None else self.pending[rank].clone()


def _cost(stack: StackedNodes, rank: int, phase: int) -> Traffic:
    """The bytes of a rank's messages of one round, whose lengths are known."""
    if isinstance(stack.method, Centralized):
        dtype: torch.dtype = stack.codec.quantizer.dtype  # type: ignore[attr-defined]
        whole = torch.empty(stack.nodes[0].units.total, dtype=dtype, device="meta")
        return traffic(AllReduceOp(whole, "sum"), rank, len(stack.nodes))
    out, into = stack.topology.out_peers(rank, phase), stack.topology.peers(rank, phase)
    return Traffic(stack.message_bytes * len(out), stack.message_bytes * len(into), 1)
