"""Virtual nets: N replicas in one process, gossiping in lockstep by the same code as real ones."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.engine.drive import converse
from gradwire.engine.lockstep import Lockstep
from gradwire.gossip import Gossip
from gradwire.integrations.gossip.checkpoint import check_state, load_state, save_state
from gradwire.integrations.gossip.flat_params import CodecSpec, Flat, describe, make_node, show
from gradwire.integrations.gossip.report import GossipReport, summarize

OPTIONS = ("granularity", "overlap", "seed")


class SimulatedGossip:
    """Nets of N replicas in this process, in lockstep. Call it after all of them have taken their step.

    Attributes:
        flats: The replicas' parameters.
        nodes: Their sides of the gossip.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        spec: str | Gossip,
        codec: CodecSpec | None = None,
        *,
        granularity: str = "layer",
        overlap: bool = False,
        seed: int = 0,
    ) -> None:
        if not models:
            raise ValueError("there are no replicas to gossip; pass a list of models, one for each rank")
        world = len(models)
        self.models, self.group = list(models), Lockstep(world)
        self.flats = [Flat(model) for model in models]
        self.nodes = [
            make_node(flat, spec, codec, rank, world, granularity, seed, overlap)
            for rank, flat in enumerate(self.flats)
        ]
        self.said = describe(self.nodes[0], granularity)
        with torch.no_grad():
            for model in models[1:]:
                model.load_state_dict(models[0].state_dict())
        common = self.flats[0].read()
        for node in self.nodes:
            node.begin(common)

    def __repr__(self) -> str:
        return show("SimulatedGossip", self.said, self.nodes[0], self.nodes[0].step)

    def __call__(self) -> None:
        """One round of gossip of all replicas."""
        mixed = self.mix(torch.stack([flat.read() for flat in self.flats]))
        for flat, x in zip(self.flats, mixed, strict=True):
            flat.write_(x)

    def mix(self, x: Tensor) -> Tensor:
        """One round on parameters stacked as rows, in the order of ``model.named_parameters()``. [n, N] -> [n, N]."""
        rows = [row.clone() for row in x]  # placed in memory as a lone rank's: some sums depend on it
        overlap = self.nodes[0].overlap
        if overlap:
            rows = [node.depart(row) for node, row in zip(self.nodes, rows, strict=True)]
        heard: dict[tuple[int, int], Tensor] = {}
        talks = [converse([node.run(row, heard=heard)]) for node, row in zip(self.nodes, rows, strict=True)]
        met = [result[0] for result in self.group.drive(talks)]
        if overlap:
            for node, row, one in zip(self.nodes, rows, met, strict=True):
                node.arrive(row, one)
            met = rows
        return torch.stack(met)

    def distance(self) -> float:
        """The root mean square over replicas of |x_i - mean|."""
        x = torch.stack([flat.read() for flat in self.flats]).double()
        return float((x - x.mean(0)).square().sum(1).mean().sqrt())

    def mean_into_(self, model: nn.Module) -> None:
        """Write the mean of parameters and floating-point buffers into another model of the same make."""
        target = Flat(model)
        target.write_(torch.stack([flat.read() for flat in self.flats]).mean(0))
        with torch.no_grad():
            for name, buffer in target.buffers.items():
                buffer.copy_(torch.stack([flat.buffers[name] for flat in self.flats]).mean(0))

    def report(self, rank: int = 0) -> GossipReport:
        return summarize(self.nodes[rank], self.group.traffic[rank], len(self.nodes))

    def state_dict(self) -> list[dict[str, Tensor]]:
        """One state for each replica, as real ranks would save them."""
        world = len(self.nodes)
        return [save_state(node, flat, self.said, world) for node, flat in zip(self.nodes, self.flats, strict=True)]

    def load_state_dict(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        if len(states) != len(self.nodes):
            raise ValueError(f"there are {len(states)} states for {len(self.nodes)} replicas; pass one for each")
        for node, flat, state in zip(self.nodes, self.flats, states, strict=True):
            check_state(state, node, flat, self.said, len(self.nodes))
        for node, state in zip(self.nodes, states, strict=True):
            load_state(node, state)


def gossip_lockstep(
    models: Sequence[nn.Module], spec: str | Gossip, codec: CodecSpec | None = None, **options: Any
) -> SimulatedGossip:
    """Gossip among N replicas in this process, which start as the first.

    Options are granularity, overlap and seed, as for `gossip`.
    """
    for name in options:
        if name not in OPTIONS:
            raise ValueError(
                f"gossip_lockstep takes {', '.join(OPTIONS)}, and not {name}=: its replicas share a process, so there "
                "is no network, and none dies alone; leave it out, or call gossip in a process for each rank"
            )
    return SimulatedGossip(models, spec, codec, **options)
