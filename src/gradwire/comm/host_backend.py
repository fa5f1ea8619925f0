"""Hierarchical: one link inside a host, one to the counterparts on other hosts, and bytes counted for each."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradwire.comm.backend import Backend
from gradwire.comm.collectives import Collective, Traffic
from gradwire.comm.emulated import EmulatedBackend
from gradwire.comm.host_layout import HostLayout
from gradwire.comm.single import SingleBackend
from gradwire.comm.torch_backend import TorchBackend, subgroup
from gradwire.core.requests import Max, Request


class HostBackend(Backend):
    """Answers each ask by its scope.

    What concerns the whole world, but for maxima, are agreements before and after training, and on nobody's account.

    Attributes:
        whole: Everybody.
        local: The ranks of this host.
        between: My counterparts, one on each host.
        traffic: What crosses between hosts.
        inside: What stays inside the host.
    """

    def __init__(self, grouping: HostLayout, whole: Backend, local: Backend, between: Backend) -> None:
        self.grouping: HostLayout | None = grouping
        self.whole, self.local, self.between = whole, local, between
        self.rank, self.world, self.device = whole.rank, whole.world, whole.device

    @property
    def traffic(self) -> Any:
        return self.between.traffic

    @traffic.setter
    def traffic(self, count: Any) -> None:
        self.between.traffic = count

    @property
    def inside(self) -> Traffic:
        return self.local.traffic

    @inside.setter
    def inside(self, count: Traffic) -> None:
        self.local.traffic = count

    def move(self, collective: Collective) -> Tensor:
        return self.whole.move(collective)

    def run(self, collective: Collective) -> Tensor:
        return self.whole.run(collective)

    def answer(self, asks: Sequence[Request]) -> list[Any]:
        scopes = {ask.scope for ask in asks}
        assert len(scopes) == 1, "a round has one scope"
        (scope,) = scopes
        if scope == "world":
            return self._everywhere(asks)
        return (self.local if scope == "local" else self.between).answer(asks)

    def _everywhere(self, asks: Sequence[Request]) -> list[Any]:
        maxima = [ask for ask in asks if isinstance(ask, Max)]
        if len(maxima) < len(asks):
            return self.whole.answer(asks)
        found = self.local.answer(maxima)
        return self.between.answer([replace(ask, tensor=x) for ask, x in zip(maxima, found, strict=True)])


def subdivide(whole: Backend, grouping: HostLayout) -> HostBackend:
    """The same ranks, with groups for every host and between hosts. All ranks must call it."""
    fast = whole.inner if isinstance(whole, EmulatedBackend) else whole
    local, between = (_group(fast, ranks) for ranks in (grouping.mates(whole.rank), grouping.rail(whole.rank)))
    if isinstance(whole, EmulatedBackend):  # it is the way between hosts that is thin
        between = EmulatedBackend(between, whole.spec)
    return HostBackend(grouping, whole, local, between)


def _group(whole: Backend, ranks: Sequence[int]) -> Backend:
    if len(ranks) == 1:
        return SingleBackend()
    if not isinstance(whole, TorchBackend):
        raise ValueError(
            f"a {type(whole).__name__} cannot be divided into hosts; leave link= out, or hand in a HierarchicalLink"
        )
    members = [rank if whole.group is None else dist.get_global_rank(whole.group, rank) for rank in ranks]
    link = TorchBackend(subgroup(members, whole.group))
    link.book = whole.book  # of everybody: who is missed on one link may have been lost on another
    return link
