"""Gossip networks: how the workers of this process reach the others, behind one protocol.

`BatchedNetwork`  all workers are here, and gossip at once
`ProcessNetwork`  one worker in each process of a group
`ElasticNetwork`  one worker in each process; processes may die and come back
"""

import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.comm.collectives import AllReduceOp, Traffic
from gradwire.engine.drive import Clock
from gradwire.gossip import GossipMethod
from gradwire.integrations.gossip import BatchedGossip, ElasticGossip, GossipSync, gossip
from gradwire.integrations.gossip.report import GossipReport
from gradwire_lab.train.gossip_network import Hosts, State
from gradwire_lab.train.rank_info import RankInfo
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.replicas import Replicas


def _options(recipe: Recipe) -> dict[str, Any]:
    plan = recipe.gossip
    shared = {"granularity": plan.granularity, "overlap": plan.overlap, "seed": recipe.train.seed}
    return {"codec": plan.codec or None, **shared}


class _FixedGroup:
    """What networks have in common whose workers neither come nor go."""

    elastic = False

    def close(self) -> None: ...

    def group_step(self) -> None: ...

    def latest(self, seconds: float) -> float:
        return seconds

    def losses(self) -> dict[str, float]:
        return {}

    def rounds(self, step: int, degree: int) -> tuple[int, float]:
        return step, degree


class BatchedNetwork(_FixedGroup):
    """See `GossipNetwork`."""

    def __init__(
        self, model: nn.Module, method: GossipMethod, recipe: Recipe, rank_info: RankInfo, hosts: Hosts
    ) -> None:
        self.net = BatchedGossip(model, len(hosts), method, **_options(recipe))
        self.rank_info, self.hosts, self.clock = rank_info, hosts, Clock()
        self._by_node = torch.tensor(hosts, device=rank_info.device)

    def average_(self, replicas: Replicas) -> None:
        size = len(self.hosts[0])
        if size > 1:
            grads = replicas.grads[self._by_node]  # [nodes, workers of each, N]
            replicas.grads[self._by_node] = (grads.sum(1, keepdim=True) / size).expand_as(grads)

    def mix_(self, replicas: Replicas) -> None:
        began, rows, size = time.perf_counter(), replicas.rows, len(self.hosts[0])
        if size == 1:
            rows.copy_(self.net.mix(rows))
        else:
            rows[self._by_node] = self.net.mix(rows[self._by_node[:, 0]])[:, None].expand(-1, size, -1)
        self.clock.encode += time.perf_counter() - began  # of all workers, by the host's clock

    def check(self) -> None:
        self.net.check()

    def total(self, numbers: Tensor) -> Tensor:
        return numbers

    def mean_of(self, numbers: Tensor) -> Tensor:
        return numbers / self.rank_info.world

    def report(self) -> GossipReport:
        return self.net.report(0)

    def num_parameters(self, replicas: Replicas) -> int:
        return replicas.tensors.total

    def traffic(self, which: int) -> list[float]:
        return _numbers(self.net.traffic[self._node(which)])

    def states(self) -> list[State]:
        by_node = self.net.state_dict()
        return [by_node[self._node(rank)] for rank in self.rank_info.ranks]

    def load(self, replicas: Replicas, states: Sequence[State], traffic: Sequence[list[float]]) -> None:
        firsts = [host[0] for host in self.hosts]
        self.net.load_state_dict([states[rank] for rank in firsts])
        self.net.traffic = [_traffic(traffic[rank]) for rank in firsts]

    def _node(self, rank: int) -> int:
        return next(number for number, host in enumerate(self.hosts) if rank in host)


class ProcessNetwork(_FixedGroup):
    """See `GossipNetwork`."""

    def __init__(
        self, model: nn.Module, method: GossipMethod, recipe: Recipe, rank_info: RankInfo, alone: Hosts, across: Any
    ) -> None:
        net = gossip(model, method, across=across, **_options(recipe))
        assert isinstance(net, GossipSync)
        self.net, self.rank_info = net, rank_info
        self.hosts = alone if net.link.grouping is None else net.link.grouping.hosts
        self.clock = net.clock

    def average_(self, replicas: Replicas) -> None:
        replicas.grads.copy_(self.net.average(replicas.grads[0])[None])

    def mix_(self, replicas: Replicas) -> None:
        replicas.rows.copy_(self.net.mix(replicas.rows[0])[None])

    def check(self) -> None: ...

    def total(self, numbers: Tensor) -> Tensor:
        self.net.wait()
        return self.net.link.move(AllReduceOp(numbers, "sum"))

    def mean_of(self, numbers: Tensor) -> Tensor:
        return self.total(numbers) / self.rank_info.world

    def report(self) -> GossipReport:
        return self.net.report()

    def num_parameters(self, replicas: Replicas) -> int:
        return self.net.node.tensors.total

    def traffic(self, which: int) -> list[float]:
        link = self.net.link
        inside = [] if len(self.hosts[0]) == 1 else _numbers(link.inside)
        return [*_numbers(link.traffic), *inside]

    def states(self) -> list[State]:
        return [self.net.state_dict()]

    def load(self, replicas: Replicas, states: Sequence[State], traffic: Sequence[list[float]]) -> None:
        self.net.load_state_dict(states[0])
        self.net.link.traffic = _traffic(traffic[0][:3])
        if traffic[0][3:]:
            self.net.link.inside = _traffic(traffic[0][3:])


class ElasticNetwork:
    """See `GossipNetwork`."""

    elastic = True

    def __init__(
        self, model: nn.Module, method: GossipMethod, recipe: Recipe, rank_info: RankInfo, hosts: Hosts
    ) -> None:
        own: dict[str, Any] = {"rank": rank_info.ranks[0], "world": rank_info.world, "meeting": rank_info.rendezvous}
        net = gossip(model, method, **own, elastic=True, timeout=recipe.gossip.timeout, **_options(recipe))
        assert isinstance(net, ElasticGossip)
        self.net, self.rank_info, self.hosts, self.clock = net, rank_info, hosts, Clock()
        self._resyncs = 0

    def average_(self, replicas: Replicas) -> None: ...

    def mix_(self, replicas: Replicas) -> None:
        began = time.perf_counter()
        replicas.show_(*replicas.own(0))
        self.net()
        self._read_back(replicas)
        self.clock.wire += time.perf_counter() - began

    @torch.no_grad()
    def _read_back(self, replicas: Replicas) -> None:
        """Take over what the net has made of the model: mixed, or a neighbor's."""
        replicas.rows.copy_(self.net.flat.read()[None])
        for name, buffer in replicas.model.named_buffers():
            replicas.buffers[name].copy_(buffer[None])

    def check(self) -> None: ...

    def close(self) -> None:
        self.net.close()

    def group_step(self) -> int | None:
        if self.net.resyncs == self._resyncs:
            return None
        self._resyncs = self.net.resyncs
        return self.net.step

    def _gather(self, numbers: Tensor) -> Tensor:
        return torch.stack(list(self.net.gather_reachable(numbers).values()))

    def total(self, numbers: Tensor) -> Tensor:
        return self._gather(numbers).sum(0)

    def mean_of(self, numbers: Tensor) -> Tensor:
        return self._gather(numbers).mean(0)

    def latest(self, seconds: float) -> float:
        own = torch.tensor([seconds], dtype=torch.float64, device=self.rank_info.device)
        return float(self._gather(own).max())

    def losses(self) -> dict[str, float]:
        own = self.report()
        counts = torch.tensor([own.dropped, own.rejoined, own.drift], dtype=torch.float64, device=self.rank_info.device)
        dropped, rejoined, drift = self.total(counts).tolist()
        return {"dropped": int(dropped), "rejoined": int(rejoined), "drift": drift}

    def report(self) -> GossipReport:
        return self.net.report()

    def rounds(self, step: int, degree: int) -> tuple[int, float]:
        """A worker that came back has not made all steps of the group, and may have had dead neighbors."""
        return self.net.rounds_made, self.net.messages_sent / max(1, self.net.rounds_made)

    def num_parameters(self, replicas: Replicas) -> int:
        return replicas.tensors.total

    def traffic(self, which: int) -> list[float]:
        return [*_numbers(self.net.mesh.edges.traffic), self.net.rounds_made, self.net.messages_sent]

    def states(self) -> list[State]:
        return [self.net.state_dict()]

    def load(self, replicas: Replicas, states: Sequence[State], traffic: Sequence[list[float]]) -> None:
        replicas.show_(*replicas.own(0))
        self.net.load_state_dict(states[0])
        self._read_back(replicas)
        self.net.mesh.edges.traffic = _traffic(traffic[0][:3])
        if len(traffic[0]) > 3:  # older checkpoints do not say
            self.net.rounds_made, self.net.messages_sent = int(traffic[0][3]), int(traffic[0][4])


def _numbers(traffic: Traffic) -> list[float]:
    return [traffic.sent, traffic.received, traffic.collectives]


def _traffic(numbers: list[float]) -> Traffic:
    sent, received, collectives = numbers
    return Traffic(sent, received, int(collectives))
