"""Simulated gossip: N models in one process, which exchange messages in lockstep by the same code as real ranks."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.gossip import GossipMethod
from gradwire.integrations.gossip.batched import BatchedGossip
from gradwire.integrations.gossip.flat_params import CodecSpec, FlatParams, handle_repr
from gradwire.integrations.gossip.report import GossipReport

OPTIONS = ("granularity", "overlap", "seed")


class SimulatedGossip:
    """Gossips N models of this process, in lockstep. Call it after all of them have taken their step.

    Attributes:
        flats: The models' parameters.
        rows: The gossip of their parameters.
        nodes: Their gossip states.
    """

    def __init__(
        self, models: Sequence[nn.Module], spec: str | GossipMethod, codec: CodecSpec | None = None, **options: Any
    ) -> None:
        if not models:
            raise ValueError("there are no models to gossip; pass a list of models, one for each rank")
        self.models, self.flats = list(models), [FlatParams(model) for model in models]
        self.rows = BatchedGossip(models[0], len(models), spec, codec, stacked=False, **options)
        self.nodes = self.rows.nodes
        with torch.no_grad():
            for model in models[1:]:
                model.load_state_dict(models[0].state_dict())

    def __repr__(self) -> str:
        return handle_repr(self, self.rows.description, self.nodes[0], self.rows.step)

    def __call__(self) -> None:
        """One round of gossip of all models."""
        for flat, x in zip(self.flats, self.mix(self._stacked()), strict=True):
            flat.write_(x)

    def mix(self, x: Tensor) -> Tensor:
        """One round on parameters stacked as rows, in the order of ``model.named_parameters()``. [n, N] -> [n, N]."""
        return self.rows.mix(x)

    def distance(self) -> float:
        """The root mean square over models of |x_i - mean|."""
        x = self._stacked().double()
        return float((x - x.mean(0)).square().sum(1).mean().sqrt())

    def mean_into_(self, model: nn.Module) -> None:
        """Write the mean of parameters and floating-point buffers into another model of the same make."""
        FlatParams(model).write_all_(torch.stack([flat.read_all() for flat in self.flats]).mean(0))

    def report(self, rank: int = 0) -> GossipReport:
        """The report of one rank."""
        return self.rows.report(rank)

    def state_dict(self) -> list[dict[str, Tensor]]:
        """One state for each model, as real ranks would save them."""
        return self.rows.state_dict()

    def load_state_dict(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        self.rows.load_state_dict(states)

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
