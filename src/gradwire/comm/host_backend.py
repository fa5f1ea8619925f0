"""Hosts: one backend inside a host, one to the counterparts on other hosts, and bytes counted for each."""

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradwire.comm.backend import Backend, CountingBackend
from gradwire.comm.collectives import Collective, Traffic
from gradwire.comm.emulated import EmulatedBackend
from gradwire.comm.host_layout import HostLayout
from gradwire.comm.single import SingleBackend
from gradwire.comm.torch_backend import TorchBackend, subgroup


class HostBackend(Backend):
    """Carries out each collective by its scope.

    Collectives of the whole world are agreements before and after training, which nothing counts.

    Attributes:
        whole: All ranks.
        local: The ranks of this host.
        between: The counterparts of this rank, one on each host.
        traffic: Bytes between hosts.
        inside: Bytes inside the host.
    """

    def __init__(
        self, grouping: HostLayout, whole: CountingBackend, local: CountingBackend, between: CountingBackend
    ) -> None:
        self.grouping: HostLayout | None = grouping
        self.whole, self.local, self.between = whole, local, between
        self.rank, self.world, self.device = whole.rank, whole.world, whole.device
        self.stream_ordered = local.stream_ordered and between.stream_ordered

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

    def run(self, collective: Collective) -> Tensor:
        if collective.scope != "world":
            return (self.local if collective.scope == "local" else self.between).run(collective)
        return self.whole.move(collective)

    def move(self, collective: Collective) -> Tensor:
        return self.whole.move(collective)

    def run_into(self, collective: Collective, out: Tensor) -> None:
        if collective.scope == "world":
            out.copy_(self.run(collective))
        else:
            (self.local if collective.scope == "local" else self.between).run_into(collective, out)


def subdivide(whole: Backend, grouping: HostLayout) -> HostBackend:
    """The same ranks, with groups for every host and between hosts. All ranks must call it."""
    if not isinstance(whole, CountingBackend):
        raise ValueError(f"a {type(whole).__name__} cannot be divided into hosts; leave link= out")
    fast = whole.inner if isinstance(whole, EmulatedBackend) else whole
    local, between = (_group(fast, ranks) for ranks in (grouping.mates(whole.rank), grouping.rail(whole.rank)))
    if isinstance(whole, EmulatedBackend):  # it is the way between hosts that is thin
        between = EmulatedBackend(between, whole.spec)
    return HostBackend(grouping, whole, local, between)


def _group(whole: CountingBackend, ranks: Sequence[int]) -> CountingBackend:
    if len(ranks) == 1:
        return SingleBackend()
    if not isinstance(whole, TorchBackend):
        raise ValueError(
            f"a {type(whole).__name__} cannot be divided into hosts; leave link= out, or hand in a HostBackend"
        )
    members = [rank if whole.group is None else dist.get_global_rank(whole.group, rank) for rank in ranks]
    link = TorchBackend(subgroup(members, whole.group))
    link.book = whole.book  # of everybody: who is missed on one link may have been lost on another
    return link
