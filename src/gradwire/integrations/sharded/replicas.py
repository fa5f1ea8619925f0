"""Replicas: which ranks hold one model together, and which hold the same shards of other replicas."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from gradwire.comm.backend import Backend
from gradwire.comm.host_backend import subdivide
from gradwire.comm.host_layout import HostLayout
from gradwire.comm.torch_backend import backend_of, subgroup
from gradwire.integrations.sharded.fsdp import (
    explain_errors,
    give_back_averaging,
    names_reduced_last,
    native_group,
    param_groups,
    take_over_averaging,
)
from gradwire.integrations.sharded.hooks import ShardHooks
from gradwire.integrations.wire import Wire


@dataclass(frozen=True)
class Replicas:
    """A model that several ranks hold together, as often as there are replicas.

    Attributes:
        group: The ranks that hold the same shards as this one.
        own: The ranks that hold this replica.
        param_groups: FSDP's.
        reduced_last: Names of parameters that FSDP reduces when backward is over.
    """

    group: dist.ProcessGroup
    own: tuple[int, ...]
    param_groups: Sequence[Any]
    reduced_last: frozenset[str]

    def connect(self) -> Backend:
        """A backend of our own to all ranks of all replicas, whose hosts are the replicas."""
        replicas: list[Any] = [None] * self.group.size()
        dist.all_gather_object(replicas, self.own, group=self.group)
        ranks = sorted(rank for replica in replicas for rank in replica)
        layout = HostLayout.of([[ranks.index(rank) for rank in replica] for replica in replicas])
        everyone = len(ranks) == dist.get_world_size()
        return subdivide(backend_of(subgroup(ranks, self.group, members_only=not everyone)), layout)

    def take_over(self, link: Backend) -> None:
        """Stop FSDP from averaging between replicas, and have its errors name the ranks that were lost."""
        take_over_averaging(self.param_groups)
        if link.barrier is not None:
            explain_errors(self.param_groups, link.barrier.explain)

    def give_back(self) -> None:
        """Have FSDP average between replicas by itself again, if it did before."""
        give_back_averaging(self.param_groups)

    def attach(self, wire: Wire, model: nn.Module) -> None:
        """Have a wire average between replicas in every backward pass of the model, and FSDP no longer."""
        self.take_over(wire.link)
        hooks = ShardHooks(wire, model, self.param_groups)
        wire.remove_hooks = partial(self._give_back, hooks)

    def _give_back(self, hooks: ShardHooks) -> None:
        hooks.remove()
        self.give_back()


def find_replicas(model: nn.Module, across: object) -> Replicas | None:
    """The replicas of a sharded model; None where each rank has a replica of its own.

    Args:
        model: Sharded or not.
        across: The dimension of the mesh between replicas; None: the one over which FSDP averages by itself.

    Raises:
        ValueError: The mesh does not go with the model.
    """
    groups = param_groups(model)
    if isinstance(across, DeviceMesh):
        if across.ndim != 1:
            raise ValueError(
                f"across={across} has {across.ndim} dimensions; pass the one between replicas, as mesh['x']"
            )
        group = across.get_group()
    elif across is None and (native := native_group(groups)) is not None:
        group = native
    else:
        return None
    return Replicas(group, _own_ranks(model, group), groups, names_reduced_last(model))


def _own_ranks(model: nn.Module, group: dist.ProcessGroup) -> tuple[int, ...]:
    """The ranks that hold the same replica as this one."""
    among = dist.get_process_group_ranks(group)
    own = {dist.get_rank()}
    for name, p in model.named_parameters():
        if isinstance(p, DTensor):
            own |= set(_same_replica(name, p, among))
        elif p.requires_grad:
            raise ValueError(
                f"the parameter {name!r} is not sharded, and its gradient would be averaged between replicas only; "
                "shard it with fully_shard, or freeze it"
            )
    return tuple(sorted(own))


def _same_replica(name: str, p: DTensor, among: Iterable[int]) -> list[int]:
    """The ranks of a parameter's mesh, less those of other replicas."""
    mesh, found = p.device_mesh.mesh, p.device_mesh.get_coordinate()
    if found is None:
        raise ValueError(f"the parameter {name!r} is on a mesh without this rank; use one mesh for all parameters")
    place = tuple(found)
    for dim, placement in enumerate(p.placements):
        if placement.is_partial():
            raise ValueError(f"the parameter {name!r} is a sum of parts of several ranks; redistribute it first")
        line = mesh[tuple(slice(None) if d == dim else x for d, x in enumerate(place))].tolist()
        if line == list(among) and len(line) > 1:  # one rank is a replica, and all of its shards
            if not placement.is_replicate():
                raise ValueError(
                    f"the parameter {name!r} is sharded over ranks {line}, which were to be replicas; pass the "
                    "dimension of the mesh that fully_shard does not shard over"
                )
            mesh = mesh.select(dim, place[dim]).unsqueeze(dim)
            place = tuple(0 if d == dim else x for d, x in enumerate(place))
    return [int(rank) for rank in mesh.flatten().tolist()]
