"""Grouping: which ranks share a host.

    hosts     ((0, 1), (2, 3))     two hosts of two ranks
    mates     (0, 1)               of rank 0: those on its host
    rail      (0, 2)               of rank 0: its counterparts, one on each host

Ranks of a host find each other by what their launcher says of each: its number among the ranks of its host, and how
many those are.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Across: TypeAlias = str | Sequence[Sequence[int]]

_REMEDY = "give the ranks of each host, as in across=[[0, 1], [2, 3]]"

# A rank's number on its host, and how many are there, by launcher: torchrun, horovodrun, Open MPI, MPICH, Slurm.
_VARIABLES = (
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    ("SLURM_LOCALID", "SLURM_NTASKS_PER_NODE"),
)


class Seated(NamedTuple):
    """Where a rank is: the number of its host, and its own number there."""

    host: int
    local: int


@dataclass(frozen=True)
class HostLayout:
    """Hosts of equally many ranks, each in rising order."""

    hosts: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        ranks = [rank for host in self.hosts for rank in host]
        if sorted(ranks) != list(range(len(ranks))) or not ranks:
            raise ValueError(f"hosts with ranks {self} do not name every rank from 0 on once; {_REMEDY}")
        if len({len(host) for host in self.hosts}) > 1:
            raise ValueError(
                f"hosts with ranks {self} are not equally large, and a rank would have no counterpart on some of them; "
                "start equally many ranks on every host"
            )
        if any(rail != tuple(sorted(rail)) for rail in zip(*self.hosts, strict=True)):
            raise ValueError(
                f"hosts with ranks {self} are interlaced: first ranks, second ranks and so on must each rise from host "
                "to host, as in [[0, 1], [2, 3]] or [[0, 2], [1, 3]]; number the ranks so"
            )

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]]) -> "HostLayout":
        """Hosts as lists of ranks, in any order."""
        return cls(tuple(sorted(tuple(sorted(group)) for group in groups)))

    @classmethod
    def found(cls, places: Sequence[tuple[int, int] | None]) -> "HostLayout":
        """Hosts from what every rank's environment says: its number on its host, and how many are there."""
        hosts: list[tuple[int, ...]] = []
        rank = 0
        while rank < len(places):
            size = _known(places, rank)[1]
            for local in range(size):
                if rank + local >= len(places) or _known(places, rank + local) != (local, size):
                    _refuse(places, rank, size)
            hosts.append(tuple(range(rank, rank + size)))
            rank += size
        return cls(tuple(hosts))

    def check(self, world: int) -> None:
        """Refuse a number of ranks that is not this grouping's."""
        if self.world != world:
            raise ValueError(f"across={self} has {self.world} ranks, and there are {world}; name each of them once")

    @property
    def world(self) -> int:
        return len(self.hosts) * self.beside

    @property
    def beside(self) -> int:
        """How many ranks share a host."""
        return len(self.hosts[0])

    def seat(self, rank: int) -> Seated:
        host = next(i for i, ranks in enumerate(self.hosts) if rank in ranks)
        return Seated(host, self.hosts[host].index(rank))

    def mates(self, rank: int) -> tuple[int, ...]:
        return self.hosts[self.seat(rank).host]

    def rail(self, rank: int) -> tuple[int, ...]:
        local = self.seat(rank).local
        return tuple(host[local] for host in self.hosts)

    def __str__(self) -> str:
        return str([list(host) for host in self.hosts])


def seated(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """A rank's number on its host and how many are there, as its launcher says; None where it does not."""
    for local, size in _VARIABLES:
        if environment.get(local, "").isdigit() and environment.get(size, "").isdigit():
            return int(environment[local]), int(environment[size])
    return None


def _known(places: Sequence[tuple[int, int] | None], rank: int) -> tuple[int, int]:
    place = places[rank]
    if place is None or place[1] < 1:
        raise ValueError(
            f"nothing says which ranks share the host of rank {rank}: LOCAL_RANK and LOCAL_WORLD_SIZE, which torchrun "
            f"sets, are missing; {_REMEDY}"
        )
    return place


def _refuse(places: Sequence[tuple[int, int] | None], rank: int, size: int) -> None:
    said = [place[0] for place in places[rank : rank + size] if place is not None]
    raise ValueError(
        f"rank {rank} is one of {size} on its host, but the ranks from it on are the numbers {said} of theirs; where "
        f"ranks of a host do not follow each other, {_REMEDY}"
    )
