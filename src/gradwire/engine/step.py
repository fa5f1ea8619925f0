"""Engine: one rank's state, and the one step that changes it.

A step is one protocol per bucket, then the commit. State changes only in the commit, so a step that went wrong on any
rank leaves the state of every rank as it was. Every update is written to where its gradient lay.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradwire.core import CorruptMessageError, Key, Max, Sum
from gradwire.engine import status
from gradwire.engine.drive import Accounting, RoundGenerator, interleave
from gradwire.engine.gradients import Grads, check_moments, unsupported_message, views_and_status
from gradwire.engine.lane import Lane, LaneResult
from gradwire.engine.overflow import SkippedSteps
from gradwire.engine.plan import Plan
from gradwire.engine.state import LaneMemory, LaneState, spans, zeros
from gradwire.engine.status import ALL_MISSING, CORRUPT, NONFINITE, UNSUPPORTED
from gradwire.engine.views import GradViews


class BucketResult(NamedTuple):
    """What the protocol of one bucket led to, before the commit.

    Attributes:
        lanes: By lane.
        views: By lane: where the update was written.
        status: Of all ranks, uint8 on the device.
        extra: Data that a wrapper of the engine keeps for the bucket.
        captured: Whether the result belongs to a captured bucket, whose replays fill it again.
    """

    lanes: list[LaneResult]
    views: list[GradViews]
    status: Tensor
    extra: Any = None
    captured: bool = False


class StepResult(NamedTuple):
    """Updates by name, each where its gradient lay. A parameter without a gradient on any rank is absent."""

    updates: dict[str, Tensor]
    skipped: bool


@dataclass
class Engine:
    """One rank's state and step.

    Attributes:
        plan: What this rank compresses.
        rank: Of this rank.
        world: Number of ranks.
        seed: Of all random bits.
        device: Where lanes compute.
        rollback: Whether the state of before a step is kept until the commit. Where no kernel is fused, it is.
        host_plan: What all ranks of a host compress, where they share the work.
        shard: Which part of a sharded replica this is; random bits differ between them.
        shards: How many parts there are. What is bad in one of them is bad for all.
    """

    plan: Plan
    rank: int
    world: int
    seed: int
    device: torch.device
    rollback: bool = True
    host_plan: Plan | None = None
    shard: int = 0
    shards: int = 1

    local_rank, ranks_per_host = 0, 1  # where several ranks of a host share the work: which of how many this is

    def __post_init__(self) -> None:
        self.unwrapped = self  # the engine that holds this rank's state
        self.full_plan = self.host_plan or self.plan
        self.rollback = self.rollback or not any(lane.fused for lane in self.full_plan.lanes)
        self.step = 0
        self.states = [
            LaneState(LaneMemory(zeros(lane.state_specs(self.world), lane.tensors, self.rank, self.world, self.device)))
            for lane in self.plan.lanes
        ]
        self._starts = [0, *accumulate(map(len, self.plan.buckets))]  # of each bucket's states
        self.accounting = Accounting()
        self.skipped_steps = SkippedSteps(self.device, self.rollback)

    @property
    def lanes(self) -> Iterator[tuple[Lane, LaneState]]:
        """The lanes of this rank, with their states."""
        return zip(self.plan.lanes, self.states, strict=True)

    # -- the step --------------------------------------------------------------------------------------------------

    def run(self, grads: Grads, unscale: float = 1.0) -> RoundGenerator[StepResult]:
        """A whole step: all buckets in order, then the commit. Gradients are multiplied by ``unscale`` first."""
        if self.shards > 1:
            factor = yield from factor_inside(self, grads, unscale)
        else:
            factor = self.gradient_factor(grads, unscale)
        results = []
        for i in range(len(self.plan.buckets)):
            results.append((yield from self.run_bucket(i, grads, factor)))
        return (yield from self.finish(results, grads))

    def run_bucket(self, i: int, grads: Grads, factor: float = 1.0) -> RoundGenerator[BucketResult]:
        """Compress and exchange the lanes of one bucket, and write their updates over the gradients.

        Args:
            i: Which bucket.
            grads: By name.
            factor: What gradients are multiplied by first.
        """
        self.skipped_steps.assert_valid()
        views, own_status = views_and_status(self.plan.buckets[i], grads, self.device, factor)
        return (yield from self.bucket_rounds(i, views, own_status, self.storage_of(i), self.key))

    @property
    def key(self) -> Key:
        """Of this step's random bits."""
        return Key(self.seed, self.step, self.rank, f"shard {self.shard}" if self.shard else "")

    def storage_of(self, i: int) -> list[LaneMemory]:
        """By lane of a bucket: storage for new memories."""
        return [state.spare or LaneMemory({}) if self.rollback else state.current for state in self.states_of(i)]

    def bucket_rounds(
        self, i: int, views: list[GradViews], own_status: Tensor, storage: Sequence[LaneMemory], key: Key
    ) -> RoundGenerator[BucketResult]:
        """Encode and exchange one bucket, and write its updates over the gradients, once no lane needs those.

        Args:
            i: Which bucket.
            views: Its gradients, by lane.
            own_status: This rank's status, uint8[1] on the device.
            storage: By lane: storage for new memories.
            key: Of this step's random bits.
        """
        nonfinite, corrupt = list[Tensor](), list[CorruptMessageError]()
        own_status = own_status | self.skipped_steps.corrupt_bit
        parts = zip(self.plan.buckets[i], views, self.states_of(i), storage, strict=True)
        lanes = []
        for lane, view, state, new in parts:
            context = lane.context(key, self.world, True, view.lying())
            rounds = lane.run(view, state, new, context, nonfinite, corrupt)
            lanes.append(self.accounting.counted(lane.label, lane.units.total, rounds))
        results, shared = yield from status.with_status(interleave(lanes), own_status, nonfinite, self.world)
        if shared is None:
            own = status.merged(own_status, nonfinite)
            shared = status.of_all([own]) if self.sends_nothing else (yield from status.gather(own))
        if corrupt:
            self.skipped_steps.report_corrupt(corrupt[0])
        for view, result in zip(views, results, strict=True):
            view.write_(result.update)
        return BucketResult(results, views, shared)

    def finish(
        self, results: Sequence[BucketResult], grads: Grads, check_unused: bool = True
    ) -> RoundGenerator[StepResult]:
        """Commit what all buckets led to, or skip the step on all ranks.

        Args:
            results: Of all buckets.
            grads: By name.
            check_unused: Whether to call `assert_unused_unchanged` here; else the caller does, for all ranks of a host.
        """
        statuses = [result.status for result in results]
        if self.shards > 1:
            statuses.append((yield from status.of_host(statuses)))
        bits = status.read(statuses)
        if bits & CORRUPT:
            self.skipped_steps.raise_corrupt()
        if bits & UNSUPPORTED:
            raise ValueError(unsupported_message(grads))
        if bits & NONFINITE:
            self.skipped_steps.assert_can_skip()
            self.skip_step()
            for view in (view for result in results for view in result.views):
                view.zero_()
            return StepResult(named_updates(self.plan.lanes, results), True)
        used = (yield from self._used(grads)) if bits & ALL_MISSING else None
        if check_unused:
            self.assert_unused_unchanged(used or {})
        self._commit(results, used)
        updates = named_updates(self.plan.lanes, results)
        return StepResult({name: x for name, x in updates.items() if used is None or used[name]}, False)

    # -- the parts of a step ---------------------------------------------------------------------------------------

    def states_of(self, i: int) -> list[LaneState]:
        """The states of one bucket's lanes."""
        return self.states[self._starts[i] : self._starts[i + 1]]

    @property
    def sends_nothing(self) -> bool:
        """Whether no lane sends anything."""
        return all(lane.at(self.step)[1].local_only for lane in self.full_plan.lanes)

    def _used(self, grads: Grads) -> RoundGenerator[Mapping[str, bool]]:
        """Which parameters have a gradient on any rank at all."""
        flags = [0 if grads[name] is None else 1 for name in grads]
        if self.sends_nothing:
            return dict(zip(grads, map(bool, flags), strict=True))
        (anywhere,) = yield [Max(torch.tensor(flags, dtype=torch.int32, device=self.device))]
        return dict(zip(grads, (flag > 0 for flag in anywhere.tolist()), strict=True))

    def _commit(self, results: Sequence[BucketResult], used: Mapping[str, bool] | None) -> None:
        """Commit the new state, but keep the old one where no rank had a gradient: no update is applied there."""
        lane_results = [one for result in results for one in result.lanes]
        for lane, state, result in zip(self.plan.lanes, self.states, lane_results, strict=True):
            idle = [name for name in lane.tensors.names if used is not None and not used[name]]
            left = state.carried_by([lane.slices[name] for name in idle])
            for memory, spec in lane.state_specs(self.world).items() if idle else ():
                places = spans(spec, lane.tensors, self.rank, self.world)
                state.keep_(result.new, memory, [places[name].live for name in idle])
            state.commit(result.new, result.spare)
            state.carried_error = left
        self.step += 1

    # -- beside the step -------------------------------------------------------------------------------------------

    @property
    def skipped(self) -> int:
        """Steps that were skipped. This waits for those whose status is still on the device."""
        return self.skipped_steps.count

    def skip_step(self) -> None:
        """Count a step that was skipped, and forget what the loop observed in it."""
        self.step += 1
        self.skipped_steps.add()
        for state in self.states:
            state.observed = None

    def assert_unused_unchanged(self, used: Mapping[str, bool]) -> None:
        """Refuse parameters without a gradient on any rank whose state was changed in place."""
        changed = () if self.rollback else (lane for lane in self.full_plan.lanes if lane.fused)
        idle = [name for lane in changed for name in lane.tensors.names if not used.get(name, True)]
        if idle:
            self.skipped_steps.invalidate(
                f"no rank had a gradient of {idle[0]!r}, whose state was already overwritten (rollback=False); go back "
                "to the last checkpoint, and freeze what is not trained, or attach with rollback=True"
            )

    @property
    def clips(self) -> bool:
        """Whether a feedback clips by the norm of the whole gradient."""
        return any(getattr(lane.feedback, "clip", None) for lane in self.full_plan.lanes)

    def gradient_factor(self, grads: Grads, unscale: float = 1.0) -> float:
        """``unscale``, times local clipping, which observed moments follow."""
        if not self.clips:
            return unscale
        norms = [g.detach().double().norm() for g in grads.values() if g is not None]
        norm = float(torch.stack(norms).norm()) * unscale if norms else 0.0
        factor = min(lane.feedback.clip_factor(norm, self.world) for lane in self.full_plan.lanes)
        for state in self.states:
            state.observed = None if state.observed is None else state.observed * factor**2
        return unscale * factor

    def observe(self, moments: Mapping[str, Tensor]) -> None:
        """Add measured second moments, sum over samples of (g / batch)^2, for the variance test of the next step."""
        check_moments(moments, self.full_plan)
        for lane, state in self.lanes:
            if "second_moment" in state.tensors:
                if state.observed is None:
                    state.observed = torch.zeros_like(state.tensors["second_moment"])
                for name, place in lane.slices.items():
                    if name in moments:
                        state.observed[place] += moments[name].detach().flatten().to(state.observed)

    @property
    def delayed_updates(self) -> dict[str, Tensor]:
        """By name: what the last step agreed on, to be handed back one step late. These are the memories themselves."""
        lanes = [(lane, state.tensors["pending"]) for lane, state in self.lanes if "pending" in state.tensors]
        return {name: pending[place] for lane, pending in lanes for name, place in lane.slices.items()}


def named_updates(lanes: Sequence[Lane], results: Sequence[BucketResult]) -> dict[str, Tensor]:
    """Where updates were written, by name."""
    pairs = zip(lanes, (view for result in results for view in result.views), strict=True)
    return {name: x for lane, view in pairs for name, x in zip(lane.tensors.names, view.grads, strict=True)}


def factor_inside(engine: Engine, grads: Grads, unscale: float) -> RoundGenerator[float]:
    """As `Engine.gradient_factor`, of gradients of which each rank of a host has a part."""
    if not engine.clips:
        return unscale
    squares = [grad.detach().double().square().sum() for grad in grads.values() if grad is not None]
    own = torch.stack(squares).sum() if squares else torch.zeros((), dtype=torch.float64, device=engine.device)
    (square,) = yield [Sum(own[None], status.HOST)]
    return engine.gradient_factor({"": square.sqrt()}, unscale)
