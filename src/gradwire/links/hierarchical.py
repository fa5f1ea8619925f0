"""Hierarchical: one link inside a host, one to the counterparts on other hosts, and bytes counted for each."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch.distributed as dist
from torch import Tensor

from gradwire.core.asks import Ask, Max
from gradwire.links.collectives import Collective, Traffic
from gradwire.links.grouping import Grouping
from gradwire.links.link import Link
from gradwire.links.solo import SoloLink
from gradwire.links.throttled import ThrottledLink
from gradwire.links.torch import TorchLink, subgroup


class HierarchicalLink(Link):
    """Answers each ask by its scope.

    What concerns the whole world, but for maxima, are agreements before and after training, and on nobody's account.

    Attributes:
        whole: Everybody.
        local: The ranks of this host.
        between: My counterparts, one on each host.
        traffic: What crosses between hosts.
        inside: What stays inside the host.
    """

    def __init__(self, grouping: Grouping, whole: Link, local: Link, between: Link) -> None:
        self.grouping: Grouping | None = grouping
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

    def answer(self, asks: Sequence[Ask]) -> list[Any]:
        scopes = {ask.scope for ask in asks}
        assert len(scopes) == 1, "a round has one scope"
        (scope,) = scopes
        if scope == "world":
            return self._everywhere(asks)
        return (self.local if scope == "local" else self.between).answer(asks)

    def _everywhere(self, asks: Sequence[Ask]) -> list[Any]:
        maxima = [ask for ask in asks if isinstance(ask, Max)]
        if len(maxima) < len(asks):
            return self.whole.answer(asks)
        found = self.local.answer(maxima)
        return self.between.answer([replace(ask, tensor=x) for ask, x in zip(maxima, found, strict=True)])


def subdivide(whole: Link, grouping: Grouping) -> HierarchicalLink:
    """The same ranks, with groups for every host and between hosts. All ranks must call it."""
    fast = whole.inner if isinstance(whole, ThrottledLink) else whole
    local, between = (_group(fast, ranks) for ranks in (grouping.mates(whole.rank), grouping.rail(whole.rank)))
    if isinstance(whole, ThrottledLink):  # it is the way between hosts that is thin
        between = ThrottledLink(between, whole.spec)
    return HierarchicalLink(grouping, whole, local, between)


def _group(whole: Link, ranks: Sequence[int]) -> Link:
    if len(ranks) == 1:
        return SoloLink()
    if not isinstance(whole, TorchLink):
        raise ValueError(
            f"a {type(whole).__name__} cannot be divided into hosts; leave link= out, or hand in a HierarchicalLink"
        )
    members = [rank if whole.group is None else dist.get_global_rank(whole.group, rank) for rank in ranks]
    link = TorchLink(subgroup(members, whole.group))
    link.book = whole.book  # of everybody: who is missed on one link may have been lost on another
    return link
