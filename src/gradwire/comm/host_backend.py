"""Hosts: one backend inside a host, one to the counterparts on other hosts, and bytes counted for each."""

from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from gradwire.comm.backend import Backend, CountingBackend, SingleBackend, delegated
from gradwire.comm.collectives import Collective
from gradwire.comm.emulated import EmulatedBackend
from gradwire.comm.host_layout import HostLayout
from gradwire.comm.torch_backend import TorchBackend, subgroup


class HostBackend(Backend):
    """Carries out each collective by its scope.

    Collectives of the whole world are agreements before and after training, which are in neither count.

    Attributes:
        whole: All ranks.
        inside_host: The ranks of this host.
        between: The counterparts of this rank, one on each host.
        traffic: Bytes between hosts.
        inside: Bytes inside the host.
    """

    traffic = delegated("between", "traffic")
    inside = delegated("inside_host", "traffic")

    def __init__(
        self, host_layout: HostLayout, whole: Backend, inside_host: CountingBackend, between: CountingBackend
    ) -> None:
        self.host_layout: HostLayout | None = host_layout
        self.whole, self.inside_host, self.between = whole, inside_host, between
        self.rank, self.world, self.device, self.barrier = whole.rank, whole.world, whole.device, whole.barrier
        self.stream_ordered = inside_host.stream_ordered and between.stream_ordered

    def move(self, collective: Collective, out: Tensor | None = None) -> Tensor:
        return self.whole.move(collective, out)

    def run(self, collective: Collective, out: Tensor | None = None) -> Tensor:
        backend = {"host": self.inside_host, "across": self.between, "world": self.whole}[collective.scope]
        return backend.run(collective, out)


def subdivide(whole: Backend, host_layout: HostLayout) -> HostBackend:
    """The same ranks, with groups for every host and between hosts. All ranks must call it."""
    fast = whole.inner if isinstance(whole, EmulatedBackend) else whole
    inside_host, between = (
        _group(fast, ranks) for ranks in (host_layout.local_ranks(whole.rank), host_layout.counterparts(whole.rank))
    )
    if isinstance(whole, EmulatedBackend):  # the link between hosts is slow
        between = EmulatedBackend(between, whole.spec)
    return HostBackend(host_layout, whole, inside_host, between)


def _group(whole: Backend, ranks: Sequence[int]) -> CountingBackend:
    if len(ranks) == 1:
        return SingleBackend()
    if not isinstance(whole, TorchBackend):
        raise ValueError(
            f"a {type(whole).__name__} has no groups inside and between hosts; leave link= out, or pass a HostBackend"
        )
    members = [rank if whole.group is None else dist.get_global_rank(whole.group, rank) for rank in ranks]
    backend = TorchBackend(subgroup(members, whole.group))
    backend.barrier = whole.barrier  # of all ranks: one that is missed here may be lost to another group
    if whole.barrier is not None:
        whole.barrier.add(backend.progress)
    return backend
