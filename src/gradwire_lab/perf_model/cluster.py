"""Cluster: how many workers, on how many hosts, joined by what; and the seconds of a collective among them.

*Flat*: all workers take part in one ring, tree or exchange, and the workers of a host share its link. *Hierarchical*:
the workers of a host add up their gradients first, densely and over a fast link; only one message a host travels on.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal, TypeAlias

from gradwire.comm.alphabeta import AlphaBeta, seconds
from gradwire.comm.rates import LinkSpec
from gradwire_lab.perf_model.loopback import CollectiveCall

Algorithm: TypeAlias = Literal["ring", "tree", "best"]


@dataclass(frozen=True)
class Cluster:
    """Where a training would run.

    Attributes:
        workers: All of them.
        link: Of a host to the others.
        per_host: Workers that share a host, and its link.
        inside: The link between the workers of a host.
        algorithm: How sums and gathers travel: around a ring, as with gloo; along trees; or whichever is faster.
    """

    workers: int
    link: LinkSpec
    per_host: int = 1
    inside: LinkSpec = LinkSpec()  # noqa: RUF009 - a frozen value
    algorithm: Algorithm = "ring"

    def __post_init__(self) -> None:
        for link in (self.link, self.inside):
            require_steady(link)
        if self.workers < 1:
            raise ValueError(f"cannot predict a training of {self.workers} workers; give 1 or more")
        if self.per_host < 1 or self.workers % self.per_host:
            raise ValueError(
                f"{self.workers} workers do not make whole hosts of {self.per_host}; give hosts times workers per host"
            )

    @property
    def hosts(self) -> int:
        return self.workers // self.per_host

    def flat(self, call: CollectiveCall) -> float:
        """Seconds of a collective among all workers."""
        cost = AlphaBeta.of(self.link if self.hosts > 1 else self.inside)
        if call.kind == "all_to_all" and self.hosts > 1:
            # Unlike a ring, which enters and leaves a host once, the messages of all workers meet on the host's link.
            beyond = (self.workers - self.per_host) / (self.workers - 1)
            shared = replace(call, nbytes=call.nbytes * self.per_host * beyond)
            return self._among(shared, self.workers, cost)
        return self._among(call, self.workers, cost)

    def between(self, call: CollectiveCall) -> float:
        """Seconds of a collective among hosts, one worker of each."""
        return self._among(call, self.hosts, AlphaBeta.of(self.link))

    def within(self, call: CollectiveCall) -> float:
        """Seconds of a collective among the workers of one host."""
        return self._among(call, self.per_host, AlphaBeta.of(self.inside))

    def _among(self, call: CollectiveCall, world: int, cost: AlphaBeta) -> float:
        if world < 2:
            return 0.0
        if call.kind in _WAYS:
            ways = _WAYS[call.kind]
            chosen = ways.values() if self.algorithm == "best" else (ways[self.algorithm],)
            return min(way(call.nbytes, world, cost) for way in chosen)
        # A message to each of very many peers costs a packet's time each, however short.
        extra = (world - 1) * _PACKET * cost.beta if call.kind == "all_to_all" else 0.0
        return seconds(call.kind, call.nbytes, world, cost) + extra


def require_steady(link: LinkSpec) -> LinkSpec:
    """A link, if forecasts know its kind.

    Raises:
        ValueError: It has jitter, or loses frames.
    """
    if link.jitter_seconds or link.loss:
        raise ValueError(
            f"a forecast takes the rate and the delay of a link, but {link} has jitter or loss too; leave them out, or "
            "measure with gradwire bench network --link"
        )
    return link


_PACKET = 84  # bytes: the shortest Ethernet frame, with its preamble and gap


def tree(nbytes: float, world: int, cost: AlphaBeta) -> float:
    """An all-reduce up and down two binary trees that share the bytes, in pieces that follow one another."""
    return 2 * math.ceil(math.log2(world)) * cost.alpha + cost.carry(2 * nbytes, 2 * nbytes)


def doubling(nbytes: float, world: int, cost: AlphaBeta) -> float:
    """An all-gather in which every worker holds twice as much after every round."""
    total = (world - 1) * nbytes
    return math.ceil(math.log2(world)) * cost.alpha + cost.carry(total, total)


_WAYS: dict[str, dict[str, Callable[[float, int, AlphaBeta], float]]] = {
    "all_reduce": {"ring": partial(seconds, "all_reduce"), "tree": tree},
    "all_gather": {"ring": partial(seconds, "all_gather"), "tree": doubling},
}
