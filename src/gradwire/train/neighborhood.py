"""Neighborhood: the workers that live in this process when every worker has a model of its own, and talks to neighbors.

One real rank is a neighborhood of one row, whose net talks to other processes; virtual workers are all rows of one
tensor, and gossip at once.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.adapters.gossip import Net, StackedNet, gossip
from gradwire.adapters.gossip.report import GossipReport
from gradwire.gossip import Gossip, gossip_method
from gradwire.links.collectives import AllReduce, Traffic
from gradwire.sync.drive import Clock
from gradwire.train.place import Place
from gradwire.train.recipe import Recipe
from gradwire.train.replicas import Replicas

Weights = tuple[Tensor, dict[str, Tensor]]  # a row of parameters, and buffers


def method_of(recipe: Recipe) -> Gossip:
    """The method that [gossip] names, on its graph."""
    plan = recipe.gossip
    words = [] if plan.method == "centralized" else [plan.graph]
    words += [f"{name}={value!r}" for name, value in plan.options.items()]
    return gossip_method(f"{plan.method}({', '.join(words)})" if words else plan.method)


class Neighborhood:
    """Workers of one process.

    Attributes:
        replicas: Their models.
        net: How they talk.
    """

    def __init__(self, model: nn.Module, place: Place, recipe: Recipe) -> None:
        plan = recipe.gossip
        self.place, self.method = place, method_of(recipe)
        options: dict[str, Any] = {
            "granularity": plan.granularity,
            "overlap": plan.overlap,
            "seed": recipe.train.seed,
        }
        self.net: Net | StackedNet
        if place.virtual:
            self.net = StackedNet(model, place.world, self.method, plan.codec or None, **options)
        else:
            net = gossip(model, self.method, plan.codec or None, **options)
            assert isinstance(net, Net)
            self.net = net
        self.replicas = Replicas(model, len(place.ranks))
        self._clock = Clock()

    def mix_(self) -> None:
        """One round of gossip."""
        rows = self.replicas.rows
        if isinstance(self.net, Net):
            rows.copy_(self.net.mix(rows[0])[None])
            return
        began = time.perf_counter()
        rows.copy_(self.net.mix(rows))
        self._clock.encode += time.perf_counter() - began  # of all workers, by the host's clock

    def check(self) -> None:
        """Raise `Diverged` if parameters are no longer finite; this may wait for the device."""
        if isinstance(self.net, StackedNet):
            self.net.check()

    # -- over all workers --------------------------------------------------------------------------------------------

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, off the account of bytes."""
        if isinstance(self.net, StackedNet):
            return numbers
        self.net.land()
        return self.net.link.move(AllReduce(numbers, "sum"))

    def own(self, which: int) -> Weights:
        """What a worker of this process holds."""
        return self.replicas.rows[which], self.replicas.own_buffers(which)

    def mean(self) -> Weights:
        """The mean over all workers; counters, which are no floats, are the first worker's."""
        row = self.total(self.replicas.rows.sum(0)) / self.place.world
        return row, {name: self._mean_buffer(rows) for name, rows in self.replicas.buffers.items()}

    def _mean_buffer(self, rows: Tensor) -> Tensor:
        if rows.is_floating_point():
            return (self.total(rows.double().sum(0)) / self.place.world).to(rows.dtype)
        return self.total(rows[0] if self.place.first else torch.zeros_like(rows[0]))

    def distance(self, mean: Tensor) -> float:
        """The root mean square over workers of |x_i - mean|."""
        off = (self.replicas.rows - mean).double().square().sum()
        return float((self.total(off) / self.place.world).sqrt())

    # -- what is counted and kept ------------------------------------------------------------------------------------

    def report(self) -> GossipReport:
        """The first local worker's account."""
        return self.net.report() if isinstance(self.net, Net) else self.net.report(0)

    @property
    def clock(self) -> Clock:
        """Where the time of rounds went; virtual workers have nothing but encoding."""
        return self.net.clock if isinstance(self.net, Net) else self._clock

    def traffic(self, which: int) -> list[float]:
        counted = self.net.link.traffic if isinstance(self.net, Net) else self.net.traffic[which]
        return [counted.sent, counted.received, counted.collectives]

    def states(self) -> list[dict[str, Tensor]]:
        """The gossip's memory of each worker here."""
        return [self.net.state_dict()] if isinstance(self.net, Net) else self.net.state_dict()

    def load(self, states: list[dict[str, Tensor]], traffic: list[list[float]]) -> None:
        """Go on where these workers stopped."""
        counted = [Traffic(sent, received, int(rounds)) for sent, received, rounds in traffic]
        if isinstance(self.net, Net):
            self.net.load_state_dict(states[0])
            self.net.link.traffic = counted[0]
        else:
            self.net.load_state_dict(states)
            self.net.traffic = counted
