"""Shards: compression between replicas whose parameters are sharded (FSDP2).

Each rank holds some rows of every parameter, and exchanges them with the ranks that hold the same rows of other
replicas. What concerns the whole model is decided over all shards: a skipped step, and a norm to clip by. A host of one
rank is a replica of one shard.
"""

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from gradwire.comm.host_layout import HostLayout
from gradwire.core.keys import Key
from gradwire.core.requests import Max
from gradwire.engine import status
from gradwire.engine.drive import RoundGenerator, among_hosts
from gradwire.engine.gradients import Grads
from gradwire.engine.hosts import HOST, HostEngine, factor_inside
from gradwire.engine.plan import Plan
from gradwire.engine.state import LaneMemory
from gradwire.engine.step import BucketResult, Engine, StepResult
from gradwire.engine.views import GradViews

_BITS = (status.NONFINITE, status.UNSUPPORTED, status.CORRUPT)


class ShardEngine:
    """One rank's shards. It wraps an engine whose ranks are replicas.

    Attributes:
        unwrapped: The engine of this rank's shards.
        full_plan: Its plan.
        shard: The number of this rank in its replica.
        shards: How many ranks hold a replica.
    """

    local_rank, ranks_per_host = 0, 1  # shards are not shared out

    def __init__(
        self, plan: Plan, replicas: HostLayout, rank: int, seed: int, device: torch.device, rollback: bool = True
    ) -> None:
        replica, self.shard = replicas.place_of(rank)
        self.shards, self.full_plan = replicas.ranks_per_host, plan
        self.unwrapped = Engine(plan, replica, len(replicas.hosts), seed, device, rollback, shard=self.shard)

    def run(self, grads: Grads, unscale: float = 1.0) -> RoundGenerator[StepResult]:
        """A whole step."""
        if self.shards == 1:
            factor = self.unwrapped.gradient_factor(grads, unscale)
        else:
            factor = yield from factor_inside(self.unwrapped, grads, unscale)
        results = []
        for i in range(len(self.full_plan.buckets)):
            results.append((yield from self.run_bucket(i, grads, factor)))
        return (yield from self.finish(results, grads))

    def run_bucket(self, i: int, grads: Grads, factor: float = 1.0) -> RoundGenerator[BucketResult]:
        """As `Engine.run_bucket`, among replicas."""
        return among_hosts(self.unwrapped.run_bucket(i, grads, factor))

    def bucket_rounds(
        self, i: int, views: list[GradViews], own_status: Tensor, storage: Sequence[LaneMemory], key: Key
    ) -> RoundGenerator[BucketResult]:
        """As `Engine.bucket_rounds`, among replicas."""
        return among_hosts(self.unwrapped.bucket_rounds(i, views, own_status, storage, key))

    def finish(self, results: Sequence[BucketResult], grads: Grads) -> RoundGenerator[StepResult]:
        """Commit, or skip the step on all shards of all replicas."""
        if self.shards > 1:
            worst = yield from self.worst_status(results)
            results = [result._replace(status=result.status | worst) for result in results]
        return (yield from among_hosts(self.unwrapped.finish(results, grads)))

    def worst_status(self, results: Sequence[BucketResult]) -> RoundGenerator[Tensor]:
        """What is bad on any shard of any replica, uint8.

        Which gradients are missing concerns the counterparts of this rank alone, and is in the results already.
        """
        found = torch.stack([result.status.view(()) for result in results])
        mine = torch.stack([(found & bit).amax() for bit in _BITS]).to(torch.int32)
        (bits,) = yield [Max(mine, HOST)]
        worst: Tensor = bits.sum().to(torch.uint8)
        return worst

    def observe(self, moments: Mapping[str, Tensor]) -> None:
        """As `Engine.observe`; an empty shard has no moments."""
        self.unwrapped.observe({name: x for name, x in moments.items() if x.numel()})

    def skip_step(self) -> None:
        """Count a step that was skipped, and forget what the loop observed in it."""
        self.unwrapped.skip_step()

    @property
    def delayed_updates(self) -> dict[str, Tensor]:
        """By name: what the last step agreed on, to be handed back one step late."""
        return self.unwrapped.delayed_updates

    @property
    def extra_state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold besides the memories."""
        place = {"gradwire/shard": torch.tensor(self.shard), "gradwire/shards": torch.tensor(self.shards)}
        return place if self.shards > 1 else {}

    def load_extra_state(self, saved: Mapping[str, Tensor]) -> None:
        """There is nothing more to take over."""


AnyEngine: TypeAlias = Engine | HostEngine | ShardEngine


def final_status(engine: AnyEngine, results: Sequence[BucketResult]) -> RoundGenerator[list[Tensor]]:
    """The statuses by which all ranks commit or skip a step."""
    if isinstance(engine, ShardEngine) and engine.shards > 1:
        return [(yield from engine.worst_status(results))]
    return [result.status for result in results]


def commits_alone(engine: AnyEngine) -> bool:
    """Whether a rank that has all gradients can commit a step without knowing who lacks some (`engine/status.py`).

    The ranks of a host share the work, so they have to know.
    """
    return not isinstance(engine, HostEngine) and engine.unwrapped.world <= status.MAX_COUNTED_RANKS
