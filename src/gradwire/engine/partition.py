"""Partition: which rank of a host compresses which parameters.

Every rank of a host compresses some parameters for all of them, and exchanges them with its counterparts on the other
hosts. What a codec treats as one vector is never cut, so that hosts send exactly what single ranks with the same
gradients would send.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gradwire.core import Segments
from gradwire.engine.lane import Lane
from gradwire.engine.plan import Plan

Owners = Mapping[str, int]  # by parameter: the number, on its host, of the rank that serves it
Atom = tuple[tuple[str, ...], int]  # parameters that one rank must serve together, and their length


def assign_owners(plan: Plan, ranks_per_host: int) -> dict[str, int]:
    """Assign all parameters to the ranks of a host, with about as much work for each in every bucket."""
    owners: dict[str, int] = {}
    total = [0] * ranks_per_host
    for bucket in plan.buckets:
        owners |= balance([atom for lane in bucket for atom in _atoms(lane)], total)
    return owners


def balance(atoms: Iterable[Atom], total: list[int]) -> dict[str, int]:
    """Assign atoms to ranks. ``total`` is what each rank has in all; it is brought up to date.

    The largest go first, each to the rank that keeps the bucket shortest; among equals, to the one with least in all.
    """
    owners: dict[str, int] = {}
    filled = [0] * len(total)
    for names, size in sorted(atoms, key=lambda atom: -atom[1]):
        local_rank = min(range(len(total)), key=lambda i: (max(*filled, filled[i] + size), total[i], i))
        filled[local_rank] += size
        total[local_rank] += size
        owners |= dict.fromkeys(names, local_rank)
    return owners


def _atoms(lane: Lane) -> list[Atom]:
    if lane.units == lane.tensors:
        return [((name,), n) for name, n in zip(lane.tensors.names, lane.tensors.lengths, strict=True)]
    return [(lane.tensors.names, lane.tensors.total)]


def share(plan: Plan, owned: Owners, local_rank: int) -> Plan:
    """What one rank of a host serves: as many buckets, some of them perhaps empty."""
    buckets = [[_part(lane, owned, local_rank) for lane in bucket] for bucket in plan.buckets]
    return Plan(tuple(tuple(part for part in bucket if part is not None) for bucket in buckets), plan.world)


def _part(lane: Lane, owned: Owners, local_rank: int) -> Lane | None:
    mine = [i for i, name in enumerate(lane.tensors.names) if owned[name] == local_rank]
    if len(mine) in (0, len(lane.tensors)):
        return lane if mine else None
    layered = lane.units == lane.tensors
    assert layered or all(codec.traits.lossless for _, codec, _ in lane.step_table), "a vector was cut"
    tensors = Segments(tuple(lane.tensors.names[i] for i in mine), tuple(lane.tensors.shapes[i] for i in mine))
    return replace(lane, tensors=tensors, units=tensors if layered else tensors.merged())
