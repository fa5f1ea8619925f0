"""Batched gossip: all replicas of a group in this process, as rows of one tensor, or as models of their own."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.codecs.addends import dtype_of
from gradwire.comm import Traffic
from gradwire.comm.collectives import AllReduceOp, traffic
from gradwire.engine import Lockstep, interleave
from gradwire.gossip import Centralized, GossipMethod
from gradwire.gossip.stacked import StackedNodes, stackable
from gradwire.integrations.gossip.flat_params import CodecSpec, FlatParams, GossipOptions
from gradwire.integrations.gossip.handle import GossipHandle
from gradwire.integrations.gossip.report import GossipReport, summarize

OPTIONS = ("granularity", "overlap", "seed")  # of `gossip_lockstep`


class BatchedGossip(GossipHandle):
    """Gossips ``world`` replicas of one model. They start as the model is.

    Options are granularity, overlap and seed, as for `gossip`. Where the method has rules for all ranks at once, see
    `gossip.stacked`; else ranks exchange messages in lockstep.

    Attributes:
        flats: The parameters of each node's model; of one for all, where they lie elsewhere as rows.
        traffic: Of each node. The clock has the time of all replicas, as encoding.
    """

    def __init__(
        self,
        model: nn.Module,
        world: int,
        spec: str | GossipMethod,
        codec: CodecSpec | None = None,
        *,
        hosts: tuple[tuple[int, ...], ...] | None = None,
        stacked: bool = True,
        **options: Any,
    ) -> None:
        chosen, flat = GossipOptions(spec, codec, **options), FlatParams(model)
        nodes = [chosen.node(flat.tensors, rank, world) for rank in range(world)]
        singles, first = tuple((rank,) for rank in range(world)), nodes[0]
        super().__init__(flat, nodes, singles if hosts is None else hosts, chosen.describe(first))
        self.flats, common = [flat] * world, flat.read()
        for node in nodes:
            node.begin(common)
        # The ranks of each node, [nodes, ranks of each]; None where each has one.
        self._members = None if hosts is None else torch.tensor(hosts, device=self.flat.device)
        numbers = {rank: number for number, host in enumerate(self.hosts) for rank in host}
        self._node_of = [numbers[rank] for rank in range(len(numbers))]
        self.traffic = [Traffic() for _ in range(world)]
        self._costs: dict[int, list[Traffic]] = {}  # by round of the graph's period
        fits = stacked and stackable(first.method, first.codec, first.topology)
        self._stack = StackedNodes(self.nodes, self.flat.device) if fits else None
        self._group = Lockstep(world)

    # -- a round -------------------------------------------------------------------------------------------------------

    def mix(self, x: Tensor) -> Tensor:
        """One round on parameters in the order of ``model.named_parameters()``. [nodes, N] -> [nodes, N]."""
        began = time.perf_counter()
        if not self.nodes[0].overlap:
            x = self._round(x)
        else:
            pending = [node.pending for node in self.nodes if node.pending is not None]
            x = x + torch.stack(pending) if pending else x
            for node, row in zip(self.nodes, self._round(x) - x, strict=True):
                node.pending = row
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
            phase = self.step % self._stack.topology.period
            if phase not in self._costs:
                self._costs[phase] = [_cost(self._stack, rank, phase) for rank in range(len(self.nodes))]
            self.traffic = [old + new for old, new in zip(self.traffic, self._costs[phase], strict=True)]
            return self._stack.run(x)
        rows = [row.clone() for row in x]  # placed in memory as a lone rank's: some sums depend on it
        protocols = [interleave([node.run(row)]) for node, row in zip(self.nodes, rows, strict=True)]
        self._group.traffic = self.traffic
        return torch.stack([result[0] for result in self._group.drive(protocols)])

    def check(self) -> None:
        """Raise `Diverged` if parameters are no longer finite. On a GPU this waits for it."""
        if self._stack is not None:
            self._stack.check()
        for node in self.nodes:
            node.check()

    def close(self) -> None:
        """There is nothing to leave."""

    @property
    def step(self) -> int:
        return self.nodes[0].step

    @property
    def gamma(self) -> float:
        return self.nodes[0].gamma

    # -- over all ranks, state and report ------------------------------------------------------------------------------

    def reduce_over_processes(self, numbers: Tensor, op: str) -> tuple[Tensor, int]:
        """The numbers themselves: there is one process; and how many ranks it has."""
        return numbers, sum(map(len, self.hosts))

    def report(self, rank: int = 0) -> GossipReport:
        """The report of one rank's node."""
        self._scatter()
        number = self._node_of[rank]
        return summarize(self.nodes[number], self.flats[number], self.traffic[number])

    def state_dict(self) -> list[dict[str, Tensor]]:
        """One state for each node, as real ranks would save them."""
        self.check()
        self._scatter()
        return [self.save_node(node, flat) for node, flat in zip(self.nodes, self.flats, strict=True)]

    def load_state_dict(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        if len(states) != len(self.nodes):
            raise ValueError(f"there are {len(states)} states for {len(self.nodes)} replicas; pass one for each")
        for node, state in zip(self.nodes, states, strict=True):
            self.check_state(state, node)
        _require_common_numbers(states)
        for node, flat, state in zip(self.nodes, self.flats, states, strict=True):
            self.load_node(node, flat, state)
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


class SimulatedGossip(BatchedGossip):
    """Gossips N models of this process, in lockstep. Call it after all of them have taken their step."""

    def __init__(
        self, models: Sequence[nn.Module], spec: str | GossipMethod, codec: CodecSpec | None = None, **options: Any
    ) -> None:
        if not models:
            raise ValueError("there are no models to gossip; pass a list of models, one for each rank")
        super().__init__(models[0], len(models), spec, codec, stacked=False, **options)
        self.models, self.flats = list(models), [FlatParams(model) for model in models]
        for model in models[1:]:
            model.load_state_dict(models[0].state_dict())

    def __call__(self) -> None:
        """One round of gossip of all models."""
        for flat in self.flats:
            flat.refuse_later()
        for flat, x in zip(self.flats, self.mix(self._stacked()), strict=True):
            flat.write_(x)

    def distance(self) -> float:
        """The root mean square over models of |x_i - mean|."""
        self.check()
        x = self._stacked().double()
        return float((x - x.mean(0)).square().sum(1).mean().sqrt())

    def mean_into_(self, model: nn.Module) -> None:
        """Write the mean of parameters and floating-point buffers into another model of the same make."""
        self.check()
        FlatParams(model).write_all_(torch.stack([flat.read_all() for flat in self.flats]).mean(0))

    def _stacked(self) -> Tensor:
        return torch.stack([flat.read() for flat in self.flats])


def gossip_lockstep(
    models: Sequence[nn.Module], spec: str | GossipMethod, codec: CodecSpec | None = None, **options: Any
) -> SimulatedGossip:
    """Gossip among N models in this process, which start as the first.

    Options are granularity, overlap and seed, as for `gossip`.
    """
    for name in options:
        if name not in OPTIONS:
            raise ValueError(
                f"gossip_lockstep takes {', '.join(OPTIONS)}, and not {name}=, since its models share a process; "
                "leave it out, or call gossip in a process for each rank"
            )
    return SimulatedGossip(models, spec, codec, **options)


def _require_common_numbers(states: Sequence[Mapping[str, Tensor]]) -> None:
    """Refuse states of several runs: nodes would decode each other's messages by other random bits."""
    for name in ("seed", "step"):
        numbers = sorted({int(state[f"gradwire/{name}"]) for state in states})
        if len(numbers) > 1:
            raise ValueError(f"the states have different {name}s, {numbers}; pass those that were saved together")


def _cost(stack: StackedNodes, rank: int, phase: int) -> Traffic:
    """The bytes of a rank's messages of one round, whose lengths are known."""
    if isinstance(stack.method, Centralized):
        whole = torch.empty(stack.nodes[0].units.total, dtype=dtype_of(stack.codec), device="meta")
        return traffic(AllReduceOp(whole, "sum"), rank, len(stack.nodes))
    out, into = stack.topology.out_peers(rank, phase), stack.topology.peers(rank, phase)
    return Traffic(stack.message_bytes * len(out), stack.message_bytes * len(into), 1)
