"""Neighborhood: the workers that live in this process when every worker has a model of its own, and talks to neighbors.

One real rank is a neighborhood of one row, whose net talks to other processes; virtual workers are all rows of one
tensor, and gossip at once. With ``gossip.across``, workers of a host are one node: they step by their mean gradient,
hold the same parameters, and gossip as one.
"""

import time
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.comm.collectives import AllReduceOp, Traffic
from gradwire.comm.host_layout import HostLayout
from gradwire.engine.drive import Clock
from gradwire.gossip import Gossip, gossip_method
from gradwire.integrations.gossip import BatchedGossip, ElasticGossip, GossipSync, gossip
from gradwire.integrations.gossip.report import GossipReport
from gradwire_lab.train.place import Place
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.replicas import Replicas

Weights = tuple[Tensor, dict[str, Tensor]]  # a row of parameters, and buffers


def method_of(recipe: Recipe) -> Gossip:
    """The method that [gossip] names, on its graph."""
    plan = recipe.gossip
    words = [] if plan.method == "centralized" else [plan.graph]
    words += [f"{name}={value!r}" for name, value in plan.options.items()]
    return gossip_method(f"{plan.method}({', '.join(words)})" if words else plan.method)


def nodes(world: int, across: str | list[list[int]] | None) -> tuple[tuple[int, ...], ...]:
    """Workers of one process by node.

    Raises:
        ValueError: Hosts are asked for, which virtual workers do not have.
    """
    if across is None:
        return tuple((rank,) for rank in range(world))
    if isinstance(across, str):
        raise ValueError(
            f"gossip.across={across!r} would make one node of all {world} workers of this process; say which of them "
            "are one, as in --set gossip.across=[[0,1],[2,3]]"
        )
    grouping = HostLayout.of(across)
    grouping.check(world)
    return grouping.hosts


def check_graph(recipe: Recipe, world: int) -> None:
    """Refuse a graph that is none of so many workers, before anything is written; hosts are not known yet."""
    across = recipe.gossip.across
    if recipe.gossip.method and across != "hosts":
        method_of(recipe).graph.on(world if isinstance(across, str) else len(across))


class Neighborhood:
    """Workers of one process.

    Attributes:
        replicas: Their models.
        net: How they talk.
        hosts: The workers that are one node, node by node.
    """

    def __init__(self, model: nn.Module, place: Place, recipe: Recipe) -> None:
        plan = recipe.gossip
        self.place, self.method = place, method_of(recipe)
        options: dict[str, Any] = {
            "granularity": plan.granularity,
            "overlap": plan.overlap,
            "seed": recipe.train.seed,
        }
        across = None if plan.across == "ranks" else plan.across
        self.net: GossipSync | BatchedGossip | ElasticGossip
        if place.virtual:
            self.hosts = nodes(place.world, across)
            self.net = BatchedGossip(model, len(self.hosts), self.method, plan.codec or None, **options)
        elif plan.elastic:
            self.hosts = nodes(place.world, None)
            seat: dict[str, Any] = {"rank": place.ranks[0], "world": place.world, "meeting": place.meeting}
            seat |= {"elastic": True, "timeout": plan.timeout}
            net = gossip(model, self.method, plan.codec or None, **seat, **options)
            assert isinstance(net, ElasticGossip)
            self.net = net
        else:
            net = gossip(model, self.method, plan.codec or None, across=across, **options)
            assert isinstance(net, GossipSync)
            self.net, found = net, net.link.grouping
            self.hosts = nodes(place.world, None) if found is None else found.hosts
        self.replicas = Replicas(model, len(place.ranks))
        self._seats = torch.tensor(self.hosts, device=place.device)
        self._clock = Clock()

    @property
    def beside(self) -> int:
        """How many workers are one node."""
        return len(self.hosts[0])

    @property
    def share(self) -> int:
        """Parameters that the first worker here gossips: all, but for a node's ranks, which gossip a part each."""
        return self.net.node.tensors.total if isinstance(self.net, GossipSync) else self.replicas.tensors.total

    def average_(self) -> None:
        """Give the workers of a node the mean of their gradients."""
        grads = self.replicas.grads
        if isinstance(self.net, GossipSync):
            grads.copy_(self.net.average(grads[0])[None])
        elif self.beside > 1:
            by_node = grads[self._seats]  # [nodes, workers of each, N]
            grads[self._seats] = (by_node.sum(1, keepdim=True) / self.beside).expand_as(by_node)

    def mix_(self) -> None:
        """One round of gossip."""
        rows = self.replicas.rows
        if isinstance(self.net, GossipSync):
            rows.copy_(self.net.mix(rows[0])[None])
            return
        began = time.perf_counter()
        if isinstance(self.net, ElasticGossip):
            self.replicas.show_(*self.own(0))
            self.net()
            self._read_back()
            self._clock.wire += time.perf_counter() - began
            return
        if self.beside == 1:
            rows.copy_(self.net.mix(rows))
        else:
            rows[self._seats] = self.net.mix(rows[self._seats[:, 0]])[:, None].expand(-1, self.beside, -1)
        self._clock.encode += time.perf_counter() - began  # of all workers, by the host's clock

    @torch.no_grad()
    def _read_back(self) -> None:
        """Take over what an elastic net has made of the model: mixed, or a neighbor's."""
        assert isinstance(self.net, ElasticGossip)
        self.replicas.rows.copy_(self.net.flat.read()[None])
        for name, buffer in self.replicas.model.named_buffers():
            self.replicas.buffers[name].copy_(buffer[None])

    @property
    def elastic(self) -> bool:
        """Whether workers may come and go."""
        return isinstance(self.net, ElasticGossip)

    @property
    def taken(self) -> int:
        """How often the worker of this process has become a copy of a neighbor, to go on at its step."""
        return self.net.taken if isinstance(self.net, ElasticGossip) else 0

    @property
    def step(self) -> int:
        """How many steps the group has taken; this may wait for neighbors."""
        assert isinstance(self.net, ElasticGossip)
        return self.net.step

    def close(self) -> None:
        """Leave those who go on."""
        if isinstance(self.net, ElasticGossip):
            self.net.close()

    def check(self) -> None:
        """Raise `Diverged` if parameters are no longer finite; this may wait for the device."""
        if isinstance(self.net, BatchedGossip):
            self.net.check()

    # -- over all workers --------------------------------------------------------------------------------------------

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, or all that can be reached, off the account of bytes."""
        if isinstance(self.net, BatchedGossip):
            return numbers
        if isinstance(self.net, ElasticGossip):
            return torch.stack(list(self.net.reach(numbers).values())).sum(0)
        self.net.land()
        return self.net.link.move(AllReduceOp(numbers, "sum"))

    def mean_of(self, numbers: Tensor) -> Tensor:
        """The mean over all workers, or all that can be reached, of what each process has added up over its own."""
        if isinstance(self.net, ElasticGossip):
            return torch.stack(list(self.net.reach(numbers).values())).mean(0)
        return self.total(numbers) / self.place.world

    def own(self, which: int) -> Weights:
        """What a worker of this process holds."""
        return self.replicas.rows[which], self.replicas.own_buffers(which)

    def mean(self) -> Weights:
        """The mean over all workers; counters, which are no floats, are the first worker's."""
        row = self.mean_of(self.replicas.rows.sum(0))
        return row, {name: self._mean_buffer(rows) for name, rows in self.replicas.buffers.items()}

    def _mean_buffer(self, rows: Tensor) -> Tensor:
        if rows.is_floating_point():
            return self.mean_of(rows.double().sum(0)).to(rows.dtype)
        if self.elastic:
            return rows[0]  # the first worker may be dead
        return self.total(rows[0] if self.place.first else torch.zeros_like(rows[0]))

    def distance(self, mean: Tensor) -> float:
        """The root mean square over workers of |x_i - mean|."""
        off = (self.replicas.rows - mean).double().square().sum()
        return float(self.mean_of(off).sqrt())

    def latest(self, seconds: float) -> float:
        """The most that any worker gives that can be reached; of a group that none leaves, this one's own."""
        if not isinstance(self.net, ElasticGossip):
            return seconds
        own = torch.tensor([seconds], dtype=torch.float64, device=self.place.device)
        return max(float(told) for told in self.net.reach(own).values())

    def losses(self) -> dict[str, float]:
        """What all workers that can be reached have lost and found again: one that came back remembers nothing."""
        if not isinstance(self.net, ElasticGossip):
            return {}
        own = self.report()
        told = torch.tensor([own.dropped, own.rejoined, own.drift], dtype=torch.float64, device=self.place.device)
        dropped, rejoined, drift = self.total(told).tolist()
        return {"dropped": int(dropped), "rejoined": int(rejoined), "drift": drift}

    # -- what is counted and kept ------------------------------------------------------------------------------------

    def report(self) -> GossipReport:
        """The first local worker's account."""
        return self.net.report(0) if isinstance(self.net, BatchedGossip) else self.net.report()

    def rounds(self, step: int, degree: int) -> tuple[int, float]:
        """Rounds that bytes are counted of, and how many neighbors the first worker here told in each, on average.

        An elastic worker that came back has not made all steps of the group, and may have had dead neighbors.
        """
        net = self.net
        return (net.made, net.told / max(1, net.made)) if isinstance(net, ElasticGossip) else (step, degree)

    @property
    def clock(self) -> Clock:
        """Where the time of rounds went; virtual workers have nothing but encoding."""
        return self.net.clock if isinstance(self.net, GossipSync) else self._clock

    def traffic(self, which: int) -> list[float]:
        if isinstance(self.net, GossipSync):
            link = self.net.link
            counts = [link.traffic] if self.beside == 1 else [link.traffic, link.inside]
        elif isinstance(self.net, ElasticGossip):
            count = self.net.peers.traffic
            return [count.sent, count.received, count.collectives, self.net.made, self.net.told]
        else:
            counts = [self.net.traffic[self._node(which)]]
        return [number for count in counts for number in (count.sent, count.received, count.collectives)]

    def states(self) -> list[dict[str, Tensor]]:
        """The gossip's memory of each worker here."""
        if not isinstance(self.net, BatchedGossip):
            return [self.net.state_dict()]
        by_node = self.net.state_dict()
        return [by_node[self._node(rank)] for rank in self.place.ranks]

    def load(self, states: list[dict[str, Tensor]], traffic: list[list[float]]) -> None:
        """Go on where these workers stopped."""
        if isinstance(self.net, GossipSync):
            self.net.load_state_dict(states[0])
            self.net.link.traffic, *inside = [_traffic(traffic[0][i : i + 3]) for i in range(0, len(traffic[0]), 3)]
            if inside:
                (self.net.link.inside,) = inside
        elif isinstance(self.net, ElasticGossip):
            self.replicas.show_(*self.own(0))
            self.net.load_state_dict(states[0])
            self._read_back()
            self.net.peers.traffic = _traffic(traffic[0][:3])
            if len(traffic[0]) > 3:  # older checkpoints do not say
                self.net.made, self.net.told = int(traffic[0][3]), int(traffic[0][4])
        else:
            firsts = [host[0] for host in self.hosts]
            self.net.load_state_dict([states[rank] for rank in firsts])
            self.net.traffic = [_traffic(traffic[rank]) for rank in firsts]

    def _node(self, rank: int) -> int:
        return next(number for number, host in enumerate(self.hosts) if rank in host)


def _traffic(numbers: list[float]) -> Traffic:
    sent, received, rounds = numbers
    return Traffic(sent, received, int(rounds))
