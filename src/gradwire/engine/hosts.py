"""Hosts: the ranks of a host take the mean of their gradients, and act as one rank toward other hosts.

    reduce-scatter   in the host: each rank gets the mean of the gradients that it serves: dense
    exchange         each rank exchanges its share with its counterparts on other hosts, as one rank a host would:
                     compressed
    all-gather       in the host: each rank sends the others the updates of its share: dense

So no link between hosts is idle, each of L ranks of a host has 1/L of the work and of the state, and the outcome is
that of single ranks with the hosts' mean gradients. The status of a share is passed on to all ranks of the host, so all
ranks of all hosts come to the same decision.
"""

from collections.abc import Mapping, Sequence
from functools import reduce
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from gradwire.comm.host_layout import HostLayout
from gradwire.core import Key, Max, Payload, SendRecv, as_bytes, from_bytes, on
from gradwire.engine import status
from gradwire.engine.drive import RoundGenerator
from gradwire.engine.gradients import Grads, by_name, check_moments, views_and_status
from gradwire.engine.lane import Lane
from gradwire.engine.partition import Owners, share
from gradwire.engine.plan import Plan
from gradwire.engine.state import LaneMemory
from gradwire.engine.status import HOST, MISSING, UNSUPPORTED
from gradwire.engine.step import BucketResult, Engine, StepResult, factor_inside, named_updates
from gradwire.engine.views import GradViews


class HostMean(NamedTuple):
    """The host's mean gradients of one bucket, for the share of one of its ranks.

    Attributes:
        grads: By name. They are zeros where no rank of the host has a gradient.
        has_grad: uint8 on the device, in the same order: whether any rank has one.
        status: uint8[1] on the device: what the ranks of the host report.
    """

    grads: dict[str, Tensor]
    has_grad: Tensor
    status: Tensor

    def known(self) -> dict[str, Tensor | None]:
        """The gradients that there are. This waits for the device."""
        pairs = zip(self.grads.items(), self.has_grad.tolist(), strict=True)
        return {name: x if here else None for (name, x), here in pairs}


class HostBucket(NamedTuple):
    """What a rank knows of a bucket: the mean gradients of its share, and, of delayed lanes, the next updates."""

    mean: HostMean
    views: list[GradViews]
    delayed: dict[str, Tensor]


class HostEngine:
    """One rank's share of what its host, which has several, compresses. It wraps an engine whose ranks are hosts.

    Attributes:
        unwrapped: The engine of this rank's share.
        full_plan: The plan of all parameters.
        shares: What each rank of the host serves.
    """

    shard, shards = 0, 1  # each rank has whole parameters

    def __init__(
        self,
        full_plan: Plan,
        owned: Owners,
        host_layout: HostLayout,
        rank: int,
        seed: int,
        device: torch.device,
        rollback: bool = True,
    ) -> None:
        host, self.local_rank = host_layout.place_of(rank)
        self.ranks_per_host = host_layout.ranks_per_host
        self.full_plan = full_plan
        self.shares = [share(full_plan, owned, local_rank) for local_rank in range(self.ranks_per_host)]
        own, hosts = self.shares[self.local_rank], len(host_layout.hosts)
        self.unwrapped = Engine(own, host, hosts, seed, device, rollback, full_plan)
        self._moments: dict[str, Tensor] = {}
        self._delayed = {
            name: torch.zeros(n, device=device)
            for i, plan in enumerate(self.shares)
            for lane in plan.lanes
            for name, n in zip(lane.tensors.names, lane.tensors.lengths, strict=True)
            if i != self.local_rank and self._is_delayed(lane)
        }

    def run(self, grads: Grads, unscale: float = 1.0) -> RoundGenerator[StepResult]:
        """A whole step. Clipping needs the host's whole gradient, so all of it comes in before any goes out."""
        inner, means, results = self.unwrapped, list[HostMean](), list[BucketResult]()
        views = [views_and_status(bucket, grads, inner.device) for bucket in self.full_plan.buckets]
        for i, (rank_views, own_status) in enumerate(views):
            means.append((yield from self._reduce_scatter(i, rank_views, own_status)))
        mine = {name: grad for mean in means for name, grad in mean.grads.items()}
        factor = yield from factor_inside(inner, mine, unscale)
        for i, mean in enumerate(means):
            given = mean, views[i][0], factor, inner.storage_of(i), inner.key
            results.append((yield from self._exchange_and_gather(i, *given)))
        return (yield from self.finish(results, grads))

    def run_bucket(self, i: int, grads: Grads) -> RoundGenerator[BucketResult]:
        """All three parts for one bucket."""
        inner = self.unwrapped
        inner.skipped_steps.assert_valid()
        views, own_status = views_and_status(self.full_plan.buckets[i], grads, inner.device)
        return (yield from self.bucket_rounds(i, views, own_status, inner.storage_of(i), inner.key))

    def bucket_rounds(
        self, i: int, views: list[GradViews], own_status: Tensor, storage: Sequence[LaneMemory], key: Key
    ) -> RoundGenerator[BucketResult]:
        """As `Engine.bucket_rounds`; the views are those of all parameters of the bucket."""
        mean = yield from self._reduce_scatter(i, views, own_status)
        return (yield from self._exchange_and_gather(i, mean, views, 1.0, storage, key))

    def finish(self, results: Sequence[BucketResult], grads: Grads) -> RoundGenerator[StepResult]:
        """Commit the share, or skip the step on all ranks of all hosts."""
        bits = status.read(result.status for result in results)
        mine = dict(grads)
        if bits & MISSING and not bits & UNSUPPORTED:
            mine = {name: x for result in results for name, x in result.extra.mean.known().items()}
        alike = [x._replace(status=torch.full_like(x.status, bits), views=x.extra.views) for x in results]
        outcome = yield from self.unwrapped.finish(alike, mine, check_unused=False)
        updates = named_updates(self.full_plan.lanes, results)
        if outcome.skipped:
            for view in (view for result in results for view in result.views):
                view.zero_()
            return StepResult(updates, True)
        if bits & MISSING:
            updates = yield from self._used_anywhere(updates, outcome)
        delayed = {name: x for result in results for name, x in result.extra.delayed.items()}
        self._delayed |= {name: x for name, x in delayed.items() if name in updates and name in self._delayed}
        return StepResult(updates, False)

    # -- reduce-scatter ------------------------------------------------------------------------------------------------

    def _reduce_scatter(self, i: int, views: Sequence[GradViews], own_status: Tensor) -> RoundGenerator[HostMean]:
        """Send the gradients of others' shares, and take the mean of this rank's own."""
        lanes = list(zip(self.full_plan.buckets[i], views, strict=True))
        grads = {name: x for lane, view in lanes for name, x in zip(lane.tensors.names, view.grads, strict=True)}
        has_grad = {name: x for lane, view in lanes for name, x in zip(lane.tensors.names, view.has_grad, strict=True)}
        messages = {
            peer: self._gradients(self.shares[peer].buckets[i], grads, has_grad, own_status & UNSUPPORTED)
            for peer in range(self.ranks_per_host)
        }
        size = messages[self.local_rank].nbytes
        (received,) = yield [SendRecv(messages, dict.fromkeys(messages, size), HOST)]
        return self._mean(i, [received[peer] for peer in messages])

    def _gradients(
        self, lanes: Sequence[Lane], grads: Mapping[str, Tensor], has_grad: Mapping[str, bool], own_status: Tensor
    ) -> Payload:
        """Gradients of some lanes, and observed moments; then bytes: which gradients there are, status, moments."""
        device = self.unwrapped.device
        sizes = {name: n for lane in lanes for name, n in zip(lane.tensors.names, lane.tensors.lengths, strict=True)}
        tested = [name for lane in lanes if self._tests_variance(lane) for name in lane.tensors.names]
        has_moments = any(name in self._moments for name in tested)
        moments = [self._moments.pop(name, torch.zeros(sizes[name], device=device)) for name in tested]
        flats = [grads[name].reshape(-1).to(device, torch.float32) for name in sizes]
        notes = on(tuple(int(has_grad[name]) for name in sizes), device).to(torch.uint8)
        return host_message([*flats, *moments], [notes, own_status, on((int(has_moments),), device).to(torch.uint8)])

    def _mean(self, i: int, received: Sequence[Payload]) -> HostMean:
        """The mean of what the ranks of the host sent, added in their order."""
        lanes = self.unwrapped.plan.buckets[i]
        tested = [k for k, lane in enumerate(lanes) if self._tests_variance(lane)]
        sizes = [lane.tensors.total for lane in lanes] + [lanes[k].tensors.total for k in tested]
        numbers, notes = zip(*(read_message(payload, sum(sizes)) for payload in received), strict=True)
        worst = reduce(torch.maximum, notes)
        has_grad, status_of_host, observed = worst[:-2], worst[-2:-1], worst[-1:]
        parts = reduce(torch.add, numbers).split(sizes)
        if tested and bool(observed):
            for k, moments in zip(tested, parts[len(lanes) :], strict=True):
                # The host's gradient is the mean over its ranks, so each sample weighs so much less.
                self.unwrapped.states_of(i)[k].observed = moments / self.ranks_per_host**2
        grads = by_name(lanes, [part / self.ranks_per_host for part in parts[: len(lanes)]])
        return HostMean(grads, has_grad, status_of_host | ((has_grad == 0).any() * MISSING).to(torch.uint8))

    def observe(self, moments: Mapping[str, Tensor]) -> None:
        """Keep measured second moments until the next step sends them to the ranks that need them."""
        check_moments(moments, self.full_plan)
        for name, moment in moments.items():
            flat = moment.detach().flatten().to(self.unwrapped.device).float()
            self._moments[name] = self._moments[name] + flat if name in self._moments else flat.clone()

    def skip_step(self) -> None:
        """Count a step that was skipped, and forget what the loop observed in it."""
        self.unwrapped.skip_step()
        self._moments.clear()

    # -- exchange, all-gather -----------------------------------------------------------------------------------------

    def _exchange_and_gather(
        self, i: int, mean: HostMean, views: list[GradViews], factor: float, storage: Sequence[LaneMemory], key: Key
    ) -> RoundGenerator[BucketResult]:
        """Exchange this rank's share with other hosts, and the updates of all shares inside the host."""
        lanes, device = self.unwrapped.plan.buckets[i], self.unwrapped.device
        shares = [GradViews([mean.grads[name] for name in lane.tensors.names], device, factor) for lane in lanes]
        result = yield from self.unwrapped.bucket_rounds(i, shares, mean.status, storage, key)
        agreed = [
            [one.new.tensors["pending"]] if self._is_delayed(lane) else [x.reshape(-1) for x in view.grads]
            for lane, one, view in zip(lanes, result.lanes, shares, strict=True)
        ]
        message = host_message([x for parts in agreed for x in parts], [result.status.view(1)])
        sizes = [sum(lane.tensors.total for lane in plan.buckets[i]) for plan in self.shares]
        into = {peer: 4 * n + 1 for peer, n in enumerate(sizes)}
        (received,) = yield [SendRecv(dict.fromkeys(into, message), into, HOST)]
        worst = reduce(torch.bitwise_or, [payload.data[-1] for payload in received.values()])
        delayed = self._write_(i, views, [read_message(received[peer], n)[0] for peer, n in enumerate(sizes)])
        return result._replace(views=views, status=worst, extra=HostBucket(mean, shares, delayed))

    def _write_(self, i: int, views: Sequence[GradViews], numbers: Sequence[Tensor]) -> dict[str, Tensor]:
        """Write the updates of all shares over the gradients; what delayed lanes hand back at the next step."""
        updates: dict[str, Tensor] = {}
        delayed: dict[str, Tensor] = {}
        for plan, flat in zip(self.shares, numbers, strict=True):
            lanes = plan.buckets[i]
            for lane, part in zip(lanes, flat.split([lane.tensors.total for lane in lanes]), strict=True):
                (delayed if self._is_delayed(lane) else updates).update(by_name([lane], [part]))
        before = self.delayed_updates if delayed else {}
        updates |= {name: before[name].view(x.shape) for name, x in delayed.items()}
        for lane, view in zip(self.full_plan.buckets[i], views, strict=True):
            torch._foreach_copy_(view.grads, [updates[name] for name in lane.tensors.names])
        return {name: x.flatten() for name, x in delayed.items()}

    def _used_anywhere(self, updates: Mapping[str, Tensor], mine: StepResult) -> RoundGenerator[dict[str, Tensor]]:
        """The updates of parameters that any rank of any host has a gradient for."""
        used_here = [name in mine.updates for name in updates]
        flags = torch.tensor(used_here, dtype=torch.int32, device=self.unwrapped.device)
        (flags,) = yield [Max(flags, HOST)]
        used = dict(zip(updates, map(bool, flags.tolist()), strict=True))
        self.unwrapped.assert_unused_unchanged(used)
        return {name: x for name, x in updates.items() if used[name]}

    # -- what is delayed, and what is saved ----------------------------------------------------------------------------

    @property
    def delayed_updates(self) -> dict[str, Tensor]:
        """By name: what the last step agreed on, to be handed back one step late."""
        return {**self.unwrapped.delayed_updates, **self._delayed}

    @property
    def extra_state(self) -> dict[str, Tensor]:
        """What a checkpoint must hold besides the memories."""
        place = {"gradwire/local": torch.tensor(self.local_rank), "gradwire/beside": torch.tensor(self.ranks_per_host)}
        return {**place, **{f"pending/{name}": x.clone().cpu() for name, x in self._delayed.items()}}

    def load_extra_state(self, saved: Mapping[str, Tensor]) -> None:
        """Take over what `extra_state` saved."""
        for name in self._delayed:
            if f"pending/{name}" in saved:
                self._delayed[name] = saved[f"pending/{name}"].clone().to(self.unwrapped.device)

    def _is_delayed(self, lane: Lane) -> bool:
        return lane.at(self.unwrapped.step)[1].delays

    def _tests_variance(self, lane: Lane) -> bool:
        return "second_moment" in lane.at(self.unwrapped.step)[0].memories


AnyEngine: TypeAlias = Engine | HostEngine


def commits_alone(engine: AnyEngine) -> bool:
    """Whether a rank that has all gradients can commit a step without knowing who lacks some (`engine/status.py`).

    The ranks of a host share the work, so they have to know.
    """
    return engine.ranks_per_host == 1 and engine.unwrapped.world <= status.MAX_COUNTED_RANKS


def host_message(numbers: Sequence[Tensor], notes: Sequence[Tensor]) -> Payload:
    """Float32 numbers, then bytes."""
    return Payload(torch.cat([*(as_bytes(x.float()) for x in numbers), *notes]))


def read_message(message: Payload, n: int) -> tuple[Tensor, Tensor]:
    return from_bytes(message.data[: 4 * n], torch.float32), message.data[4 * n :]
