"""Local rows: workers of this process that take local steps, as [local] of a recipe describes.

The loop has their parameters as rows, as it has those of workers that gossip. `gradwire.local` has a replica of the
model for each, whose parameters and statistics lie in the same memory.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.comm.collectives import AllReduceOp
from gradwire.core.segments import Segments
from gradwire.integrations.local import LocalSync, SimulatedLocal, local, local_lockstep
from gradwire_lab.train.rank_info import RankInfo
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.workers import account, views


class LocalRows:
    """The workers of this process, whose parameters are rows [workers here, N]; see `GossipHandle`.

    Attributes:
        ranks: The handle of each.
        hosts: Each worker is a node of its own.
    """

    elastic, resyncs = False, 0

    def __init__(self, replicas: Sequence[nn.Module], table: Segments, recipe: Recipe, rank_info: RankInfo) -> None:
        plan = recipe.local
        options: dict[str, Any] = {"seed": recipe.train.seed, **plan.layout, **plan.message}
        self.outer: LocalSync | SimulatedLocal
        if rank_info.simulated:
            self.outer = local_lockstep(replicas, [[] for _ in replicas], plan.spec, **options)
            self.ranks = self.outer.ranks
        else:
            self.outer = local(replicas[0], [], plan.spec, **options)
            self.ranks = [self.outer]
        self._replicas, self._table, self._simulated = replicas, table, rank_info.simulated
        self.hosts = tuple((rank,) for rank in range(rank_info.world))
        self._earlier = [[0.0] * 6 for _ in self.ranks]  # what earlier sessions counted

    @property
    def step(self) -> int:
        return self.ranks[0].steps

    def average_rows(self, grads: Tensor) -> Tensor:
        """In the start, the mean over all workers; later, gradients as they are."""
        if self.ranks[0].starting:
            for replica, row in zip(self._replicas, grads, strict=True):
                for name, part in views(self._table, row).items():
                    replica.get_parameter(name).grad = part
            self.outer.average_gradients()
        return grads

    def mix_rows(self, rows: Tensor) -> Tensor:
        """Parameters after an inner step has been counted, which may end a round; it changes them in place."""
        self.outer()
        return rows

    def outer_row(self) -> Tensor:
        """The weights that all workers share."""
        return torch.cat([x.detach().flatten() for x in self.ranks[0].outer.weights.values()])

    # -- over all processes --------------------------------------------------------------------------------------------

    def sum_over_processes(self, numbers: Tensor) -> tuple[Tensor, int]:
        return self._over_processes(numbers, "sum"), len(self.hosts)

    def max_over_processes(self, number: float) -> float:
        return float(self._over_processes(torch.tensor([number], dtype=torch.float64), "max"))

    def _over_processes(self, numbers: Tensor, op: str) -> Tensor:
        if self._simulated:
            return numbers
        rank = self.ranks[0]
        rank.wires  # noqa: B018 - messages under way come first
        return rank.link.move(AllReduceOp(numbers.to(rank.wire.device), op))

    def check(self) -> None:
        """Rounds whose differences are not finite are dropped, so there is nothing to stop for."""

    def close(self) -> None:
        """Wait for messages under way."""
        for rank in self.ranks:
            rank.wires  # noqa: B018

    # -- records and checkpoints ---------------------------------------------------------------------------------------

    def start_fields(self) -> dict[str, Any]:
        method = str(self.ranks[0].schedule)
        return {"spec": method, "method": method}

    def account(self) -> dict[str, Any]:
        """Bytes as the first worker counts them."""
        (sent, received, payload, dense, rounds, skipped), world = self.counters()[0], len(self.hosts)
        ring = 2 * (world - 1) / world * dense
        bytes_and_seconds = account(sent, received, payload, dense, ring, self.ranks[0].wire.clock)
        since = max(fragment.age for fragment in self.ranks[0].fragments)
        return {**bytes_and_seconds, "rounds": int(rounds), "skipped": int(skipped), "since_round": since}

    def state_dicts(self) -> list[dict[str, Tensor]]:
        return [rank.state_dict() for rank in self.ranks]

    def load_state_dicts(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        for rank, state in zip(self.ranks, states, strict=True):
            rank.load_state_dict(state)

    def counters(self) -> list[list[float]]:
        """Bytes sent, received, encoded, and of float32; rounds; dropped ones."""
        pairs = zip(self.ranks, self._earlier, strict=True)
        return [[a + b for a, b in zip(_counts(rank), earlier, strict=True)] for rank, earlier in pairs]

    def load_counters(self, counters: Sequence[Sequence[float]]) -> None:
        self._earlier = [list(one) for one in counters]


def replica_of(model: nn.Module, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> nn.Module:
    """A copy of a model in the memory of these parameters and statistics."""
    replica = deepcopy(model)
    for name, x in parameters.items():
        replica.get_parameter(name).data = x
    for name, x in buffers.items():
        replica.get_buffer(name).data = x
    return replica


def _counts(rank: LocalSync) -> list[float]:
    report = rank.report()
    received = report.rounds.received + (0 if report.start is None else report.start.received)
    dense = report.dense + (0 if report.start is None else report.start.dense)
    return [report.sent, received, report.payload, dense, report.rounds.steps, report.skipped]
