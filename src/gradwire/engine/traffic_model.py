"""Traffic model: what messages cost that are never written.

A request whose tensors have a shape but no content is fused like any other, and the resulting collectives are counted
instead of carried out.
"""

from collections.abc import Sequence
from functools import reduce
from operator import add

import torch
from torch import Tensor

from gradwire.comm.collectives import AllGatherOp, AllReduceOp, AllToAllOp, Collective, Traffic, fuse, traffic
from gradwire.core.requests import Gather, Request, SendRecv, Sum, run
from gradwire.engine.status import request_for
from gradwire.exchanges.batch import META


class AgreedGather(Gather):
    """A gather whose length the group had to agree on; ``size`` is what it agreed on."""


def costs(rounds: Sequence[Sequence[Request]], world: int, first: bool) -> list[Traffic]:
    """What a round costs each rank, given the requests by lane and rank. The status travels with a bucket's first."""
    lanes = list(rounds)
    if first:
        lanes.append([_status_beside(rounds[0][0], world)] * world)
    alike = [lane[0] for lane in lanes if not isinstance(lane[0], SendRecv)]  # sums and gathers cost all the same
    cost = _cost(alike, world) if alike else Traffic()
    shards = [[request for request in lane if isinstance(request, SendRecv)] for lane in lanes]
    by_rank = list(zip(*filter(None, shards), strict=True))
    if not by_rank:
        return [cost] * world
    return [cost + traffic(_all_to_all(own, world), rank, world) for rank, own in enumerate(by_rank)]


def _status_beside(other: Request, world: int) -> Request:
    """The status as `request_for` makes it; arithmetic without content would take longer than all the rest."""
    if isinstance(other, Sum):
        return Sum(torch.empty(1, dtype=other.tensor.dtype, device=META))
    return request_for(torch.empty(1, dtype=torch.uint8, device=META), other, world)


def _cost(requests: Sequence[Request], world: int) -> Traffic:
    collectives: list[Collective] = []

    def record(collective: Collective) -> Tensor:
        collectives.append(collective)
        x = collective.tensor
        return x.new_empty(world, x.numel()) if isinstance(collective, AllGatherOp) else x

    if agreed := sum(isinstance(request, AgreedGather) for request in requests):
        record(AllReduceOp(torch.empty(agreed, dtype=torch.int64, device=META), "max"))
    run(fuse(requests, world), record)
    return reduce(add, (traffic(collective, 0, world) for collective in collectives), Traffic())


def _all_to_all(requests: Sequence[SendRecv], world: int) -> AllToAllOp:
    """What `fuse` makes of these, without its copies."""
    out = tuple(sum(request.out[rank].nbytes for request in requests) for rank in range(world))
    into = tuple(sum(request.into[rank] for request in requests) for rank in range(world))
    return AllToAllOp(torch.empty(0, device=META), out, into)
