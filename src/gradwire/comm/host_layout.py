"""Host layout: which ranks share a host.

    hosts          ((0, 1), (2, 3))     two hosts of two ranks
    local_ranks    (0, 1)               of rank 0: those on its host
    counterparts   (0, 2)               of rank 0: one on each host

The layout is found from what the launcher sets for each rank: its number on its host, and how many are there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

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
        if any(list(counterparts) != sorted(counterparts) for counterparts in zip(*self.hosts, strict=True)):
            raise ValueError(
                f"hosts with ranks {self} are interlaced: first ranks, second ranks and so on must each rise from host "
                "to host, as in [[0, 1], [2, 3]] or [[0, 2], [1, 3]]; number the ranks so"
            )

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]]) -> "HostLayout":
        """Hosts as lists of ranks, in any order."""
        return cls(tuple(sorted(tuple(sorted(group)) for group in groups)))

    @classmethod
    def from_launcher(cls, places: Sequence[tuple[int, int] | None]) -> "HostLayout":
        """Hosts from every rank's environment: its number on its host, and how many are there."""
        known = [_known(place, rank) for rank, place in enumerate(places)]
        starts = [rank for rank, (local_rank, _) in enumerate(known) if local_rank == 0]
        hosts = tuple(tuple(range(start, stop)) for start, stop in pairwise((*starts, len(known))))
        for host in hosts:
            local_ranks, sizes = zip(*(known[rank] for rank in host), strict=True)
            if local_ranks != tuple(range(len(host))) or set(sizes) != {len(host)}:
                raise ValueError(
                    f"rank {host[0]} is one of {sizes[0]} on its host, but ranks {list(host)} have the numbers "
                    f"{list(local_ranks)} there; where ranks of a host do not follow each other, {_REMEDY}"
                )
        return cls(hosts)

    def check(self, world: int) -> None:
        """Refuse a number of ranks that is not this layout's."""
        if self.world != world:
            raise ValueError(f"across={self} has {self.world} ranks, and there are {world}; name each of them once")

    @property
    def world(self) -> int:
        return len(self.hosts) * self.ranks_per_host

    @property
    def ranks_per_host(self) -> int:
        return len(self.hosts[0])

    def place_of(self, rank: int) -> tuple[int, int]:
        """The number of a rank's host, and its own number there."""
        ranks = self.local_ranks(rank)
        return self.hosts.index(ranks), ranks.index(rank)

    def local_ranks(self, rank: int) -> tuple[int, ...]:
        """The ranks of a rank's host."""
        return next(host for host in self.hosts if rank in host)

    def counterparts(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same number on every host."""
        return next(ranks for ranks in zip(*self.hosts, strict=True) if rank in ranks)

    def __str__(self) -> str:
        return str([list(host) for host in self.hosts])


def given_hosts(across: Across) -> list[list[int]] | None:
    """The ranks of each host; None for ``"hosts"``: they are to be found.

    Raises:
        ValueError: It is another text.
    """
    if isinstance(across, str) and across != "hosts":
        raise ValueError(f"across={across!r} is unknown; write 'hosts', or the ranks of each, as in [[0, 1], [2, 3]]")
    return None if isinstance(across, str) else [[int(rank) for rank in host] for host in across]


def launcher_place(environment: Mapping[str, str]) -> tuple[int, int] | None:
    """A rank's number on its host and how many are there, as its launcher set them; None where it did not."""
    for number, size in _VARIABLES:
        if environment.get(number, "").isdigit() and environment.get(size, "").isdigit():
            return int(environment[number]), int(environment[size])
    return None


def _known(place: tuple[int, int] | None, rank: int) -> tuple[int, int]:
    if place is None or place[1] < 1:
        raise ValueError(
            f"the ranks that share the host of rank {rank} are not known: LOCAL_RANK and LOCAL_WORLD_SIZE, which "
            f"torchrun sets, are missing; {_REMEDY}"
        )
    return place
