"""Batched: all ranks of one process as segments of one buffer.

Ranks that live in one process do the same thing to buffers of the same shape. Laid end to end these are one buffer, in
which each rank's units have names of their own, so that a step takes as many kernels for all ranks as for one. Messages
are not written; their bytes are counted: requests whose tensors have a shape but no content are fused like any other,
and the resulting collectives are counted instead of carried out. The outcome is that of `lockstep`, bit for bit:
updates, state and accounts. Where not all lanes `can_batch`, ranks run one by one instead.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import torch
from torch import Tensor

from gradwire.comm.collectives import AllGatherOp, AllReduceOp, AllToAllOp, Collective, Traffic, fuse, traffic
from gradwire.core import PER_RANK, Gather, Key, Request, SendRecv, Sum
from gradwire.core.layout import joined, same_memory
from gradwire.core.requests import run
from gradwire.engine.drive import Clock, nbytes
from gradwire.engine.encoders import Encoder
from gradwire.engine.gradients import Grads, by_name, views_of
from gradwire.engine.lane import Lane
from gradwire.engine.lockstep import Lockstep
from gradwire.engine.state import LaneMemory, LaneState
from gradwire.engine.status import request_for
from gradwire.engine.step import Engine, StepResult
from gradwire.engine.views import GradViews
from gradwire.exchanges.batch import META, RankBatch, Simulated, Sizes, blank, stacked
from gradwire.exchanges.servers import SERVER_ERROR, server_slice


class AgreedGather(Gather):
    """A gather whose length the group had to agree on; ``size`` is what it agreed on."""


@dataclass
class Batched:
    """Steps of all engines of a lockstep together.

    Attributes:
        engines: Of all ranks.
        group: Counts the bytes.
        clock: The time of the last step, which is that of all ranks.
    """

    engines: Sequence[Engine]
    group: Lockstep

    def __post_init__(self) -> None:
        self.world, self.clock = len(self.engines), Clock()
        self._stacked: list[LaneState] = []
        self._committed: list[list[LaneMemory]] = []  # the engines' states after the last step, by lane and rank
        # By lane: the gradients of all ranks, and the buffer in which they lie end to end.
        self._flats: dict[int, tuple[list[Tensor], Tensor]] = {}

    def can_run(self, grads: Sequence[Grads]) -> bool:
        """Whether this step can be taken for all ranks at once."""
        first = self.engines[0]
        steps = {(engine.step, engine.shard) for engine in self.engines}
        plain = self.group.host_layout is None and len(steps) == 1
        dense = all(x is not None and x.layout == torch.strided for own in grads for x in own.values())
        intact = not any(engine.skipped_steps.corrupt_error for engine in self.engines)  # else ranks exchange a status
        # Moments were observed on all ranks or on none.
        alike = len({tuple(state.observed is None for state in engine.states) for engine in self.engines}) == 1
        # After a change of the spec, some ranks alone may carry an error of the one before.
        settled = all(state.carried_error is None for engine in self.engines for state in engine.states)
        runnable = all(self._can_run_lane(lane, state) for lane, state in first.lanes)
        return plain and dense and intact and alike and settled and runnable and not first.clips

    def _can_run_lane(self, lane: Lane, state: LaneState) -> bool:
        encoder = lane.encoder(self.engines[0].step)
        left = encoder.feedback.keeps_error and not encoder.exchange.keeps_server_error
        return can_batch(encoder) and not (left and SERVER_ERROR in state.tensors)

    def run(self, grads: Sequence[Grads], unscale: float = 1.0) -> StepResult:
        """The updates of all ranks, which are the same tensors for all.

        The device is read once, at the end: whether any gradient was not finite, and how long messages are. (Selectors
        whose number of entries varies read it once before.)
        """
        first, self.clock = self.engines[0], Clock()
        first.skipped_steps.assert_valid()
        lanes, nonfinite, results = first.plan.lanes, list[Tensor](), list[Simulated]()
        for i, (lane, state) in enumerate(zip(lanes, self._states(), strict=True)):
            flat = self._flat(i, lane, grads, unscale)
            results.append(self._run_lane(lane, flat, state, first.key.of(PER_RANK), nonfinite))
        skip, requests = _read(nonfinite, [result[2] for result in results])
        self._count(requests)
        if skip:
            first.skipped_steps.assert_can_skip()
            for engine in self.engines:
                engine.skip_step()
            return StepResult(by_name(lanes, [torch.zeros_like(mean) for mean, _, _ in results]), True)
        self._commit([LaneMemory(dict(memory)) for _, memory, _ in results])
        return StepResult(by_name(lanes, [mean for mean, _, _ in results]), False)

    # -- one lane --------------------------------------------------------------------------------------------------

    def _flat(self, i: int, lane: Lane, grads: Sequence[Grads], unscale: float) -> Tensor:
        """All ranks' gradients of a lane end to end. Where they lie so already, they do in the next step, too."""
        lying = [x for own in grads for name in lane.tensors.names if (x := own[name]) is not None]
        known = self._flats.get(i)
        if known is not None and unscale == 1.0 and all(a is b for a, b in zip(known[0], lying, strict=True)):
            return known[1]
        flat = joined([views_of(lane, own, self.engines[0].device, unscale).flat() for own in grads])
        if same_memory(flat, lying[0]):
            self._flats[i] = lying, flat
        return flat

    def _run_lane(self, lane: Lane, flat: Tensor, state: LaneState, key: Key, nonfinite: list[Tensor]) -> Simulated:
        began = time.perf_counter()
        encoder = lane.encoder(key.step)
        ranks = range(self.world if encoder.exchange.sends_slices else 0)
        cuts = tuple(server_slice(lane.units.total, self.world, rank) for rank in ranks)
        context = lane.context(key, self.world)._replace(units=stacked(lane.units, self.world, cuts), simulated=True)
        storage = LaneMemory({}) if self.engines[0].rollback else state.current
        message = encoder.encode(GradViews([flat], flat.device), state, storage, context, nonfinite)
        encoded = time.perf_counter()
        assert encoder.exchange.simulate is not None and message.sent is not None
        batch = RankBatch(key, self.world, lane.units, encoder.feedback.keeps_error)
        mean, memory, requests = encoder.exchange.simulate(message.sent, message.memory, encoder.codec, batch)
        if encoder.feedback.finalize is not None:
            updates, memory = encoder.feedback.finalize(mean.repeat(self.world), memory)
            mean = updates[: mean.numel()]
        elapsed = Clock(encode=encoded - began, decode=time.perf_counter() - encoded)
        for clock in (self.clock, *(engine.accounting.seconds[lane.label] for engine in self.engines)):
            clock.add(elapsed)
        return mean, memory, requests

    # -- state -----------------------------------------------------------------------------------------------------

    def _states(self) -> list[LaneState]:
        """All ranks' states end to end, by lane; those of the last step, unless an engine got others since."""
        ours = self._committed and all(
            engine.states[i].current is parts[rank]
            for i, parts in enumerate(self._committed)
            for rank, engine in enumerate(self.engines)
        )
        if not ours:
            every = range(len(self.engines[0].states))
            self._stacked = [_stack([engine.states[i] for engine in self.engines]) for i in every]
        for i, state in enumerate(self._stacked):
            observed = [seen for engine in self.engines if (seen := engine.states[i].observed) is not None]
            state.observed = torch.cat(observed) if observed else None
        return self._stacked

    def _commit(self, generations: list[LaneMemory]) -> None:
        self._committed = []
        for i, (lane, new) in enumerate(zip(self.engines[0].plan.lanes, generations, strict=True)):
            self._stacked[i].commit(new)
            parts = _unstack(new, lane.units.total, self.world)
            self._committed.append(parts)
            for engine, part in zip(self.engines, parts, strict=True):
                engine.states[i].commit(part)
        for engine in self.engines:
            engine.step += 1

    # -- accounts --------------------------------------------------------------------------------------------------

    def _count(self, requests: Sequence[list[list[Request]]]) -> None:
        """Put on every rank's account what its messages would have cost."""
        plan = self.engines[0].plan
        for lane, rounds in zip(plan.lanes, requests, strict=True):
            for rank, engine in enumerate(self.engines):
                engine.accounting.dense[lane.label] += 4 * lane.units.total
                engine.accounting.encoded[lane.label] += sum(nbytes(each[rank]) for each in rounds)
        at = 0
        for bucket in plan.buckets:
            lanes, at = requests[at : at + len(bucket)], at + len(bucket)
            for i in range(max(map(len, lanes))):
                rounds = [each[i] for each in lanes if i < len(each)]
                for rank, price in enumerate(costs(rounds, self.world, first=i == 0)):
                    self.group.traffic[rank] += price


def can_batch(encoder: Encoder) -> bool:
    """Whether ranks of one process may be encoded at once: everything must be done unit by unit."""
    codec = encoder.codec
    drops = codec.indices is not None and codec.indices.drop_overflow is not None
    return not drops and codec.transform is None and encoder.exchange.simulate is not None


def _read(
    nonfinite: Sequence[Tensor], results: Sequence[list[list[Request]] | Sizes]
) -> tuple[bool, list[list[list[Request]]]]:
    """Whether a gradient was not finite, and the requests of each lane, now that all lengths are known."""
    waiting = [each.positions for each in results if isinstance(each, Sizes) and each.positions is not None]
    skip, *numbers = torch.cat([torch.stack(list(nonfinite)).any().long()[None], *waiting]).tolist()
    left, requests = iter(numbers), []
    for each in results:
        if isinstance(each, Sizes):
            sizes = each.known if each.positions is None else [n + next(left) for n in each.known]
            each = [[AgreedGather(blank(n), max(sizes)) for n in sizes]]
        requests.append(each)
    return bool(skip), requests


def _stack(states: Sequence[LaneState]) -> LaneState:
    names = states[0].tensors
    return LaneState(LaneMemory({name: torch.cat([state.tensors[name] for state in states]) for name in names}))


def _unstack(new: LaneMemory, n: int, world: int) -> list[LaneMemory]:
    """Each rank's part of every memory; of a memory that is cut into shards, its own shard."""
    parts = [LaneMemory({}) for _ in range(world)]
    for name, x in new.tensors.items():
        for rank in range(world):
            start, stop = server_slice(n, world, rank) if name == SERVER_ERROR else (rank * n, (rank + 1) * n)
            parts[rank].tensors[name] = x[start:stop]
    return parts


def costs(rounds: Sequence[Sequence[Request]], world: int, first: bool) -> list[Traffic]:
    """What a round costs each rank, given the requests by lane and rank. The status travels with a bucket's first."""
    lanes = list(rounds)
    if first:
        lanes.append([status_beside(rounds[0][0], world)] * world)
    alike = [lane[0] for lane in lanes if not isinstance(lane[0], SendRecv)]  # sums and gathers cost all ranks the same
    cost = _cost(alike, world) if alike else Traffic()
    shards = [[request for request in lane if isinstance(request, SendRecv)] for lane in lanes]
    by_rank = list(zip(*filter(None, shards), strict=True))
    if not by_rank:
        return [cost] * world
    return [cost + traffic(_all_to_all(own, world), rank, world) for rank, own in enumerate(by_rank)]


def status_beside(other: Request, world: int) -> Request:
    """The request that `request_for` makes, without its arithmetic, which would take longer than all the rest."""
    if isinstance(other, Sum):
        return Sum(torch.empty(1, dtype=other.tensor.dtype, device=META))
    return request_for(torch.empty(1, dtype=torch.uint8, device=META), other, world)


def _cost(requests: Sequence[Request], world: int) -> Traffic:
    collectives: list[Collective] = []

    def record(collective: Collective) -> Tensor:
        collectives.append(collective)
        x = collective.tensor
        return x.new_empty(world, x.numel()) if isinstance(collective, AllGatherOp) else x

    if agreed := sum(isinstance(request, AgreedGather) for request in requests):
        record(AllReduceOp(torch.empty(agreed, dtype=torch.int64, device=META), "max"))
    run(fuse(requests, world), record)
    return reduce(add, (traffic(collective, 0, world) for collective in collectives), Traffic())


def _all_to_all(requests: Sequence[SendRecv], world: int) -> AllToAllOp:
    """The collective that `fuse` makes of these requests, without its copies."""
    out = tuple(sum(request.out[rank].nbytes for request in requests) for rank in range(world))
    into = tuple(sum(request.into[rank] for request in requests) for rank in range(world))
    return AllToAllOp(torch.empty(0, device=META), out, into)
