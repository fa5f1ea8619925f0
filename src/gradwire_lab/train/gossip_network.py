"""Gossip network: what workers that gossip ask of whatever connects them; see `gossip_networks` for the three kinds."""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from gradwire.engine.drive import Clock
from gradwire.integrations.gossip.report import GossipReport
from gradwire_lab.train.replicas import Replicas

Hosts = tuple[tuple[int, ...], ...]
State = dict[str, Tensor]


class GossipNetwork(Protocol):
    """One protocol for all of them.

    Attributes:
        hosts: The workers that are one node, node by node.
        elastic: Whether workers may come and go.
        clock: Where the time of rounds went; virtual workers have nothing but encoding.
    """

    hosts: Hosts
    elastic: bool
    clock: Clock

    def average_(self, replicas: Replicas) -> None:
        """Give the workers of a node the mean of their gradients."""

    def mix_(self, replicas: Replicas) -> None:
        """One round of gossip."""

    def check(self) -> None:
        """Raise `Diverged` if parameters are no longer finite; this may wait for the device."""

    def close(self) -> None:
        """Leave the group."""

    def group_step(self) -> int | None:
        """The group's step, if the worker of this process has become a copy of a neighbor since the last call."""

    def total(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, or all that can be reached, off the account of bytes."""

    def mean_of(self, numbers: Tensor) -> Tensor:
        """The mean over all workers, or all that can be reached, of what each process has added up over its own."""

    def latest(self, seconds: float) -> float:
        """The most that any worker gives that can be reached; where workers cannot come and go, this one's own."""

    def losses(self) -> dict[str, float]:
        """How often all workers that can be reached have lost and regained a neighbor."""

    def report(self) -> GossipReport:
        """The account of the first worker here."""

    def rounds(self, step: int, degree: int) -> tuple[int, float]:
        """Rounds that bytes are counted of, and how many neighbors the first worker here sent to, on average."""

    def num_parameters(self, replicas: Replicas) -> int:
        """Parameters that the first worker here gossips: all, but for a node's ranks, which gossip a part each."""

    def traffic(self, which: int) -> list[float]:
        """What a worker here has counted, for a checkpoint."""

    def states(self) -> list[State]:
        """The gossip's memory of each worker here."""

    def load(self, replicas: Replicas, states: Sequence[State], traffic: Sequence[list[float]]) -> None:
        """Go on where these workers stopped."""
