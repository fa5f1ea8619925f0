"""Shares: which rank of a host speaks for which parameters.

Every rank of a host compresses some parameters for all of them, and talks to its counterparts on the other hosts. What
a codec sees as one vector is never cut, so that hosts say exactly what single ranks with the same gradients would say.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from gradwire.core.segments import Segments
from gradwire.engine.lane import Lane
from gradwire.engine.plan import Plan

Owners = Mapping[str, int]  # by parameter: the number, on its host, of the rank that serves it
Atom = tuple[tuple[str, ...], int]  # what one rank must serve as a whole, and its length


def owners(plan: Plan, beside: int) -> dict[str, int]:
    """Share all parameters out, so that the ranks of a host have about as much to do in each launch.

    The largest go first, each to whom it makes the launch least longer; among equals, to whom has least in all.
    """
    found: dict[str, int] = {}
    total = [0] * beside
    for launch in plan.launches:
        found |= deal(_atoms(launch), total)
    return found


def deal(atoms: Iterable[Atom], total: list[int]) -> dict[str, int]:
    """Who gets what, and how much each has then: ``total`` is brought up to date."""
    found: dict[str, int] = {}
    filled = [0] * len(total)
    for names, size in sorted(atoms, key=lambda atom: -atom[1]):
        local = _lightest(filled, total, size)
        filled[local] += size
        total[local] += size
        found.update(dict.fromkeys(names, local))
    return found


def _lightest(filled: list[int], total: list[int], size: int) -> int:
    return min(range(len(total)), key=lambda i: (max(*filled, filled[i] + size), total[i], i))


def _atoms(launch: tuple[Lane, ...]) -> list[Atom]:
    atoms: list[Atom] = []
    for lane in launch:
        if lane.units == lane.tensors:
            atoms += [((name,), n) for name, n in zip(lane.tensors.names, lane.tensors.lengths, strict=True)]
        else:
            atoms.append((lane.tensors.names, lane.tensors.total))
    return atoms


def share(plan: Plan, owned: Owners, local: int) -> Plan:
    """What one rank of a host serves: as many launches, some of them perhaps empty."""
    launches = tuple(
        tuple(part for lane in launch if (part := _part(lane, owned, local)) is not None) for launch in plan.launches
    )
    return Plan(launches, plan.world)


def _part(lane: Lane, owned: Owners, local: int) -> Lane | None:
    mine = [i for i, name in enumerate(lane.tensors.names) if owned[name] == local]
    if len(mine) in (0, len(lane.tensors)):
        return lane if mine else None
    layered = lane.units == lane.tensors
    assert layered or all(codec.traits.lossless for _, codec, _ in lane.table), "a vector was cut"
    tensors = Segments(tuple(lane.tensors.names[i] for i in mine), tuple(lane.tensors.shapes[i] for i in mine))
    return replace(lane, tensors=tensors, units=tensors if layered else tensors.merged())
