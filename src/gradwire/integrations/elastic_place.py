"""Place: where one rank of an elastic group is, and where it meets the others."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from gradwire.comm.peer_mesh import PeerMesh
from gradwire.comm.rendezvous import rendezvous

LOOPBACK = "127.0.0.1"


class ElasticPlace(NamedTuple):
    """One rank of an elastic group.

    Attributes:
        rank: Which one.
        world: How many there may be.
        meeting: A folder that all share, or ``tcp://host:port`` of a TCPStore.
        timeout: Seconds after which a silent rank is dropped.
        host: The address under which the others reach this one.
    """

    rank: int
    world: int
    meeting: str | Path
    timeout: float
    host: str

    def connect(self, neighbors: Iterable[int], training: str, most_bytes: int) -> PeerMesh:
        """Connections to neighbors, which must train the same; messages have so many bytes at most."""
        digest, table = hashlib.sha256(training.encode()).digest(), rendezvous(self.meeting)
        return PeerMesh(
            self.rank, neighbors, table, digest, most_bytes=most_bytes, timeout=self.timeout, host=self.host
        )


def elastic_place_of(
    elastic: bool, rank: int | None, world: int | None, meeting: str | Path | None, timeout: float, host: str
) -> ElasticPlace | None:
    """The place that some arguments describe; None where the group is not elastic, and then they are refused."""
    if not elastic:
        if meeting is not None or rank is not None or world is not None or host != LOOPBACK:
            raise ValueError(
                "meeting, rank, world and host belong to elastic=True; leave them out, since a process group has its "
                "ranks"
            )
        return None
    if meeting is None:
        raise ValueError("elastic=True needs meeting=: a folder that all ranks share, or tcp://host:port")
    if timeout <= 0.0:
        raise ValueError(f"timeout={timeout} leaves other ranks no time to answer; give it some seconds")
    place = ElasticPlace(_given("RANK", rank), _given("WORLD_SIZE", world), meeting, timeout, host)
    if not 0 <= place.rank < place.world:
        raise ValueError(f"rank={place.rank} is none of world={place.world}; ranks go from 0 to {place.world - 1}")
    return place


def _given(name: str, given: int | None) -> int:
    value = os.environ.get(name) if given is None else given
    if value is None:
        raise ValueError(f"elastic=True needs its rank and world; pass rank= and world=, or set {name}")
    return int(value)
