"""Stacked net: all replicas of a world in this process, as rows of one tensor, gossiping at once."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from gradwire.comm.collectives import AllReduceOp, Traffic, traffic
from gradwire.engine.drive import converse
from gradwire.engine.lockstep import Lockstep
from gradwire.gossip import Gossip
from gradwire.gossip.centralized import Centralized
from gradwire.gossip.stacked import Stack, stackable
from gradwire.integrations.gossip.checkpoint import check_state, load_state, save_state
from gradwire.integrations.gossip.flat_params import CodecSpec, Flat, describe, make_node, show
from gradwire.integrations.gossip.report import GossipReport, summarize


class BatchedGossip:
    """Nets of ``world`` replicas of one model. They start as the model is.

    Where the method has rules for all ranks at once, see `gossip.stack`; else ranks talk in lockstep.

    Attributes:
        nodes: Each replica's side of the gossip.
    """

    def __init__(
        self,
        model: nn.Module,
        world: int,
        spec: str | Gossip,
        codec: CodecSpec | None = None,
        *,
        granularity: str = "layer",
        overlap: bool = False,
        seed: int = 0,
    ) -> None:
        self.flat = Flat(model)
        self.nodes = [make_node(self.flat, spec, codec, r, world, granularity, seed, overlap) for r in range(world)]
        first = self.nodes[0]
        self.said = describe(first, granularity)
        common = self.flat.read()
        for node in self.nodes:
            node.begin(common)
        self.pending: Tensor | None = None  # with overlap: what the last round adds to the next parameters
        self._traffic = [Traffic() for _ in range(world)]
        self._costs: dict[int, list[Traffic]] = {}  # by round of the graph's period
        fits = stackable(first.method, first.codec, first.topology)
        self._stack = Stack(self.nodes, self.flat.device) if fits else None
        self._group = None if fits else Lockstep(world)

    def __repr__(self) -> str:
        return show("BatchedGossip", self.said, self.nodes[0], self.step)

    def mix(self, x: Tensor) -> Tensor:
        """One round on parameters stacked as rows, in the order of ``model.named_parameters()``. [n, N] -> [n, N]."""
        if not self.nodes[0].overlap:
            return self._round(x)
        x = x if self.pending is None else x + self.pending
        self.pending = self._round(x) - x
        return x

    def _round(self, x: Tensor) -> Tensor:
        if self._stack is not None:
            self._count(self._stack)
            return self._stack.run(x)
        assert self._group is not None
        heard: dict[tuple[int, int], Tensor] = {}
        rows = [row.clone() for row in x]  # placed in memory as a lone rank's: some sums depend on it
        talks = [converse([node.run(row, heard=heard)]) for node, row in zip(self.nodes, rows, strict=True)]
        before = list(self._group.traffic)
        met = torch.stack([result[0] for result in self._group.drive(talks)])
        for rank, (old, new) in enumerate(zip(before, self._group.traffic, strict=True)):
            fresh = Traffic(new.sent - old.sent, new.received - old.received, new.collectives - old.collectives)
            self._traffic[rank] += fresh
        return met

    def _count(self, stack: Stack) -> None:
        turn = stack.step % stack.topology.period
        if turn not in self._costs:
            self._costs[turn] = [_cost(stack, rank, turn) for rank in range(len(self.nodes))]
        self._traffic = [old + new for old, new in zip(self._traffic, self._costs[turn], strict=True)]

    def check(self) -> None:
        """Raise `Diverged` if parameters are no longer finite. On a GPU this waits for it."""
        if self._stack is not None:
            self._stack.check()

    @property
    def step(self) -> int:
        return self.nodes[0].step if self._stack is None else self._stack.step

    @property
    def gamma(self) -> float:
        return self.nodes[0].gamma if self._stack is None else self._stack.gamma

    @property
    def traffic(self) -> list[Traffic]:
        """Of each rank."""
        return self._traffic

    @traffic.setter
    def traffic(self, counted: Sequence[Traffic]) -> None:
        self._traffic = list(counted)

    def report(self, rank: int = 0) -> GossipReport:
        """One rank's account."""
        self._scatter()
        return summarize(self.nodes[rank], self._traffic[rank], len(self.nodes))

    def state_dict(self) -> list[dict[str, Tensor]]:
        """One state for each replica, as real ranks would save them."""
        self._scatter()
        world = len(self.nodes)
        return [save_state(node, self.flat, self.said, world) for node in self.nodes]

    def load_state_dict(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        if len(states) != len(self.nodes):
            raise ValueError(f"there are {len(states)} states for {len(self.nodes)} replicas; pass one for each")
        for node, state in zip(self.nodes, states, strict=True):
            check_state(state, node, self.flat, self.said, len(self.nodes))
        for node, state in zip(self.nodes, states, strict=True):
            load_state(node, state)
        late = [node.pending for node in self.nodes if node.pending is not None]
        self.pending = torch.stack(late) if late else None
        for node in self.nodes:
            node.pending = None
        if self._stack is not None:
            self._stack.gather()

    def _scatter(self) -> None:
        if self._stack is not None:
            self._stack.scatter_()
        for rank, node in enumerate(self.nodes):
            node.pending = None if self.pending is None else self.pending[rank].clone()


def _cost(stack: Stack, rank: int, turn: int) -> Traffic:
    """What a rank's letters of one round are, all of a length that is known."""
    if isinstance(stack.method, Centralized):
        dtype: torch.dtype = stack.codec.quantizer.dtype  # type: ignore[attr-defined]
        whole = torch.empty(stack.nodes[0].units.total, dtype=dtype, device="meta")
        return traffic(AllReduceOp(whole, "sum"), rank, len(stack.nodes))
    tells, hears = stack.topology.out_peers(rank, turn), stack.topology.peers(rank, turn)
    return Traffic(stack.letter_bytes * len(tells), stack.letter_bytes * len(hears), 1)
