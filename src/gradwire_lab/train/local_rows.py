"""Local rows: workers of this process that take local steps, as [local] of a recipe describes.

The loop has their parameters as rows, as it has those of workers that gossip. Replicas of the model carry them to
`gradwire.local`, and back.
"""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.comm.collectives import AllReduceOp
from gradwire.integrations.gossip.flat_params import FlatParams
from gradwire.integrations.local import LocalSync, SimulatedLocal, local, local_lockstep
from gradwire_lab.train.rank_info import RankInfo
from gradwire_lab.train.recipe import Recipe
from gradwire_lab.train.workers import account, views


class LocalRows:
    """The workers of this process, whose parameters are rows [workers here, N]; see `GossipHandle`.

    Attributes:
        ranks: The handle of each.
        hosts: Each worker is a node of its own.
        buffers: The statistics of each, which rounds average.
    """

    elastic, resyncs = False, 0

    def __init__(self, model: nn.Module, recipe: Recipe, rank_info: RankInfo) -> None:
        plan = recipe.local
        options: dict[str, Any] = {"seed": recipe.train.seed, **plan.layout, **plan.message}
        self.outer: LocalSync | SimulatedLocal
        if rank_info.virtual:
            self._models = [deepcopy(model) for _ in rank_info.ranks]
            self.outer = local_lockstep(self._models, [[] for _ in rank_info.ranks], plan.spec, **options)
            self.ranks = self.outer.ranks
        else:
            self._models = [model]
            self.outer = local(model, [], plan.spec, **options)
            self.ranks = [self.outer]
        self._flats = [FlatParams(one) for one in self._models]
        self._rows = self._read()  # as of the last step
        self._virtual, self.buffers = rank_info.virtual, list[dict[str, Tensor]]()
        self.hosts = tuple((rank,) for rank in range(rank_info.world))
        self._earlier = [[0.0] * 6 for _ in self.ranks]  # what earlier sessions counted

    @property
    def step(self) -> int:
        return self.ranks[0].steps

    def average_rows(self, grads: Tensor) -> Tensor:
        """In the start, the mean over all workers; later, gradients as they are."""
        if self.ranks[0].starting:
            for flat, row in zip(self._flats, grads, strict=True):
                for name, part in views(flat.tensors, row).items():
                    flat.parameters[name].grad = part
            self.outer.average_gradients()
        return grads

    def mix_rows(self, rows: Tensor) -> Tensor:
        """Parameters after an inner step has been counted, which may end a round."""
        self._write(rows)
        self._copy_buffers(into_models=True)
        self.outer()
        self._copy_buffers(into_models=False)
        self._rows = self._read()
        return self._rows

    def _write(self, rows: Tensor) -> None:
        for flat, row in zip(self._flats, rows, strict=True):
            flat.write_(row)

    def _read(self) -> Tensor:
        return torch.stack([flat.read() for flat in self._flats])

    @torch.no_grad()
    def _copy_buffers(self, into_models: bool) -> None:
        """Give replicas the statistics of their workers, or take them back. One worker's are the model's own."""
        for model, own in zip(self._models, self.buffers, strict=True) if self._virtual else ():
            for name, x in model.named_buffers():
                if name in own:
                    (x if into_models else own[name]).copy_(own[name] if into_models else x)

    def outer_row(self) -> Tensor:
        """The weights that all workers share."""
        return torch.cat([x.detach().flatten() for x in self.ranks[0].outer.weights.values()])

    # -- over all processes --------------------------------------------------------------------------------------------

    def sum_over_processes(self, numbers: Tensor) -> tuple[Tensor, int]:
        return self._over_processes(numbers, "sum"), len(self.hosts)

    def max_over_processes(self, number: float) -> float:
        return float(self._over_processes(torch.tensor([number], dtype=torch.float64), "max"))

    def _over_processes(self, numbers: Tensor, op: str) -> Tensor:
        if self._virtual:
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
        self._write(self._rows)  # the model of a process may show another, which was evaluated
        return [rank.state_dict() for rank in self.ranks]

    def load_state_dicts(self, states: Sequence[Mapping[str, Tensor]]) -> None:
        for rank, state in zip(self.ranks, states, strict=True):
            rank.load_state_dict(state)
        self._rows = self._read()

    def counters(self) -> list[list[float]]:
        """Bytes sent, received, encoded, and of float32; rounds; dropped ones."""
        pairs = zip(self.ranks, self._earlier, strict=True)
        return [[a + b for a, b in zip(_counts(rank), earlier, strict=True)] for rank, earlier in pairs]

    def load_counters(self, counters: Sequence[Sequence[float]]) -> None:
        self._earlier = [list(one) for one in counters]


def _counts(rank: LocalSync) -> list[float]:
    report = rank.report()
    received = report.rounds.received + (0 if report.start is None else report.start.received)
    dense = report.dense + (0 if report.start is None else report.start.dense)
    return [report.sent, received, report.payload, dense, report.rounds.steps, report.skipped]
