"""CUDA graphs: the executor of steps, which captures the step of each bucket once where it can, and replays it.

A graph knows addresses, not names. A bucket is captured once for each generation of its state, since a step reads one
and writes the other; without rollback, or without state, once. Gradients are read and written where they lie as long as
they come to the same addresses. Where `zero_grad()` sets gradients to None and addresses move, they are copied to a
buffer of the bucket's own before the replay, and the update is copied back: 16 bytes of memory traffic and 4 bytes of
memory a parameter.

    steps 1 to 3     run eagerly: kernels are compiled
    then             capture, which also runs the step; eagerly again if it fails
    every other step replay, if state, codecs and addresses are those of a capture; else eagerly

The status is read at once, unless it makes no difference to this rank who else lacks gradients: then it stays on the
device, which undoes a bad step by itself. What is captured has all gradients of this rank.
"""

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gradwire.comm.backend import Backend
from gradwire.core.deferred_checks import defer_checks
from gradwire.core.layout import Places, places, without_gaps
from gradwire.engine.capture import Captured, CaptureError, Collectives, DeviceGraph, capture, in_collectives, resume
from gradwire.engine.drive import Clock, execute
from gradwire.engine.gradients import FixedGrads, Grads, views_of
from gradwire.engine.graph_buffers import (
    MAX_CAPTURES,
    BucketCaptures,
    CapturedBucket,
    CapturedCommit,
    GraphOutputs,
    detached,
    staging_of,
    undo_if_skipped,
    undo_on_failure,
)
from gradwire.engine.sharded import AnyEngine
from gradwire.engine.step import BucketResult, StepResult, named_updates
from gradwire.engine.views import GradViews

EAGER_STEPS = 3  # before anything is captured
MAX_ADDRESS_CHANGES = 2  # times that gradients may come to other addresses before they are staged
_log = logging.getLogger("gradwire")


class StepExecutor:
    """Runs the steps of an engine, captured where they can be.

    Args:
        engine: Whose steps.
        backend: Carries out collectives.
        clock: Gets the time.
        graphs: Makes a graph; None: nothing is ever captured.

    Attributes:
        replayed: Whether the last step was replayed as a whole. Then the next one captures nothing, and may run on
            another thread while the model computes.
    """

    def __init__(
        self, engine: AnyEngine, backend: Backend, clock: Clock, graphs: Callable[[], DeviceGraph] | None
    ) -> None:
        self.engine, self._backend, self._clock, self._graphs = engine, backend, clock, graphs
        self._buckets = [BucketCaptures() for _ in engine.full_plan.buckets]
        self._commits: dict[tuple[int, ...], CapturedCommit] = {}
        self._step_counter: Tensor | None = None  # the number of the step, as captured kernels read it
        self._counter_value = -1
        self.replayed = False

    def run(self, grads: Grads, unscale: float = 1.0, complete: bool = False) -> StepResult:
        """A whole step. ``complete``: see `finish`."""
        if self._graphs is None or unscale != 1.0 or self.engine.unwrapped.clips:
            return execute(self.engine.run(grads, unscale), self._backend, self._clock)
        results = [self.run_bucket(i, grads) for i in range(len(self.engine.full_plan.buckets))]
        return self.finish(results, grads, complete)

    def run_bucket(self, i: int, grads: Grads) -> BucketResult:
        """Compress and exchange one bucket."""
        bucket, inner = self._buckets[i], self.engine.unwrapped
        inner.skipped_steps.assert_valid()
        where = None if self._graphs is None else self._places(i, grads)
        if where is None:
            return self._eager(i, grads)
        signature = self._signature(i, where)
        captured = bucket.captures.get(signature)
        if captured is not None:
            bucket.replays += 1
            self._copy_to_staging(bucket, grads, i)
            return self._replay(i, captured)
        if len(bucket.captures) >= 2:  # state or codecs were replaced
            self._forget(bucket)
        if bucket.eager < EAGER_STEPS or bucket.tries <= 0 or self.replayed:
            bucket.eager += 1
            return self._eager(i, grads)
        self._copy_to_staging(bucket, grads, i)
        return self._capture(i, grads, signature)

    def finish(self, results: Sequence[BucketResult], grads: Grads, complete: bool) -> StepResult:
        """Commit a step.

        Args:
            results: Of all buckets.
            grads: By name.
            complete: Whether all ranks have all gradients, or each commits alone (`commits_alone`): then nothing is
                read from the device if this rank's own are all there.
        """
        captured = all(result.captured for result in results)
        if not (complete and captured and self._backend.stream_ordered):
            self.replayed = False
            outcome = execute(self.engine.finish(results, grads), self._backend, self._clock)
            return self._copy_from_staging(grads, outcome)
        return self._copy_from_staging(grads, StepResult(self._commit(results), False))

    # -- what can be captured ------------------------------------------------------------------------------------------

    def _places(self, i: int, grads: Grads) -> Places | None:
        """Where captured work finds the gradients of a bucket; None if the step cannot be captured.

        All gradients must be there, and no lane may have anything to use up or to hand back late. Gradients that keep
        coming to other addresses, or have gaps, are staged in a buffer of the bucket's own; then addresses do not
        matter.
        """
        bucket, inner, lanes = self._buckets[i], self.engine.unwrapped, self.engine.full_plan.buckets[i]
        passing = any(state.carried_error is not None or state.observed is not None for state in inner.states_of(i))
        if passing or any(lane.at(inner.step)[1].delays or lane.refreshes(inner.step) for lane in lanes):
            return None
        if grads is bucket.fixed:
            return bucket.places if bucket.staging is None else ()
        bucket.fixed = None
        where = self._look(i, grads)
        if where is not None and isinstance(grads, FixedGrads):
            bucket.fixed = grads
        return where

    def _look(self, i: int, grads: Grads) -> Places | None:
        """The same, by a look at the gradients."""
        bucket, inner, lanes = self._buckets[i], self.engine.unwrapped, self.engine.full_plan.buckets[i]
        dense = []
        for grad in (grads[name] for lane in lanes for name in lane.tensors.names):
            if grad is None or grad.layout != torch.strided:
                return None
            dense.append(grad)
        if bucket.staging is not None:
            return ()
        where = places(dense)
        if where == bucket.places:
            return where
        if any(x.device != inner.device for x in dense):
            return None
        bucket.moves += bool(bucket.places)
        bucket.places = where
        if bucket.moves <= MAX_ADDRESS_CHANGES and all(map(without_gaps, dense)):
            return where
        self._forget(bucket)
        bucket.tries, bucket.eager = MAX_CAPTURES, EAGER_STEPS
        bucket.staging = [staging_of(views_of(lane, grads, inner.device), inner.device) for lane in lanes]
        return ()

    def _signature(self, i: int, where: Places) -> Hashable:
        inner, lanes = self.engine.unwrapped, self.engine.unwrapped.plan.buckets[i]
        generations = tuple(state.current for state in inner.states_of(i) if state.tensors)
        # By identity: lanes hold their encoders, and to compare those takes long.
        return generations, tuple([id(lane.encoder(inner.step)) for lane in lanes]), where

    def _copy_to_staging(self, bucket: BucketCaptures, grads: Grads, i: int) -> None:
        if bucket.staging is not None:
            for lane, view in zip(self.engine.full_plan.buckets[i], bucket.staging, strict=True):
                torch._foreach_copy_(view.grads, [detached(grads[name]) for name in lane.tensors.names])

    def _copy_from_staging(self, grads: Grads, outcome: StepResult) -> StepResult:
        """Copy updates from buffers of buckets to where the gradients lie."""
        if all(bucket.staging is None for bucket in self._buckets):
            return outcome
        updates = dict(outcome.updates)
        for bucket, lanes in zip(self._buckets, self.engine.full_plan.buckets, strict=True):
            names = [name for lane in lanes for name in lane.tensors.names if bucket.staging is not None]
            there = [name for name in names if name in updates and grads[name] is not None]
            into = [detached(grads[name]) for name in there]
            if there:
                torch._foreach_copy_(into, [updates[name] for name in there])
            updates |= dict(zip(there, into, strict=True))
        return StepResult(updates, outcome.skipped)

    # -- running -------------------------------------------------------------------------------------------------------

    def _eager(self, i: int, grads: Grads) -> BucketResult:
        self._commits.clear()
        return execute(self.engine.run_bucket(i, grads), self._backend, self._clock)

    def _replay(self, i: int, bucket: CapturedBucket) -> BucketResult:
        inner, clock = self.engine.unwrapped, Clock()
        self._set_step_counter()
        result = bucket.captured.replay(self._backend, clock)
        self._clock.add(clock)
        inner.accounting.add(bucket.encoded, bucket.dense)
        lanes = inner.plan.buckets[i]
        total = sum(lane.units.total for lane in lanes)
        for lane in lanes:  # the time of one graph is shared out by size
            inner.accounting.seconds[lane.label].add(clock, lane.units.total / max(total, 1), wire=False)
        return result

    def _set_step_counter(self) -> Tensor:
        """The number of this step on the device, where captured kernels read it."""
        inner = self.engine.unwrapped
        if self._step_counter is None:
            self._step_counter = torch.zeros(2, dtype=torch.int64, device=inner.device)
        if self._counter_value != inner.step:
            self._counter_value = inner.step
            self._step_counter[:1].fill_(inner.step & 0xFFFFFFFF)
            if inner.step >> 32:
                self._step_counter[1].fill_(inner.step >> 32)
        return self._step_counter

    # -- capturing -----------------------------------------------------------------------------------------------------

    def _capture(self, i: int, grads: Grads, signature: Hashable) -> BucketResult:
        assert self._graphs is not None
        inner, bucket = self.engine.unwrapped, self._buckets[i]
        views = bucket.staging or [views_of(lane, grads, inner.device) for lane in self.engine.full_plan.buckets[i]]
        states, accounting = inner.states_of(i), inner.accounting
        encoded, dense = accounting.encoded.copy(), accounting.dense.copy()
        outputs = GraphOutputs.of(states, inner.rollback, inner.device)
        random = replace(inner.key, device_counter=self._set_step_counter())

        def again() -> Collectives[BucketResult]:
            fresh = [GradViews(view.grads, inner.device) for view in views]
            rounds = self.engine.bucket_rounds(i, fresh, outputs.own_status, outputs.storage, random)
            return in_collectives(outputs.keep(rounds, states, corrupt, inner.skipped_steps.corrupt_bit), self._backend)

        with defer_checks() as corrupt:
            try:
                with undo_on_failure(states, inner.rollback):
                    captured = capture(again(), self._backend, self._graphs)
            except CaptureError as error:
                self._refuse(bucket, error)
                accounting.encoded, accounting.dense = encoded, dense
                corrupt.clear()
                return resume(again(), self._backend, error.results)._replace(captured=False)
        bucket.captures[signature] = CapturedBucket(captured, accounting.encoded - encoded, accounting.dense - dense)
        return captured.value

    def _forget(self, bucket: BucketCaptures) -> None:
        bucket.forget()
        self._commits.clear()

    def _refuse(self, bucket: BucketCaptures, error: CaptureError) -> None:
        """Go on eagerly. What was refused for its randomness is never tried again."""
        self._forget(bucket)
        bucket.tries = 0 if error.permanent else bucket.tries - 1
        if not error.permanent:
            _log.warning("gradwire: a bucket could not be captured (%s); it runs eagerly", error.__cause__)

    # -- commits that read nothing -------------------------------------------------------------------------------------

    def _commit(self, results: Sequence[BucketResult]) -> dict[str, Tensor]:
        """Commit as if all were well; if not, the device puts everything back. Returns the updates by name."""
        inner = self.engine.unwrapped
        signature = tuple(map(id, results))  # of captures: the table is cleared whenever one is forgotten
        commit = self._commits.get(signature)
        known = commit is not None
        if commit is None:
            commit = CapturedCommit(None, named_updates(self.engine.full_plan.lanes, results))
        if not (known or self.replayed):
            commit = self._commits[signature] = commit._replace(captured=self._capture_commit(results))
        elif commit.captured is not None:
            commit.captured.replay(self._backend, Clock())
        else:
            resume(undo_if_skipped(self.engine, self._backend, results), self._backend)
        self.replayed = known
        for state, lane in zip(inner.states, (lane for result in results for lane in result.lanes), strict=True):
            state.commit(lane.new, lane.spare)
        inner.step += 1
        inner.skipped_steps.poll()
        return commit.updates

    def _capture_commit(self, results: Sequence[BucketResult]) -> Captured[None] | None:
        assert self._graphs is not None
        self.engine.unwrapped.skipped_steps.device_counts  # noqa: B018 - allocated outside of the graph
        try:
            return capture(undo_if_skipped(self.engine, self._backend, results), self._backend, self._graphs)
        except CaptureError as error:
            resume(undo_if_skipped(self.engine, self._backend, results), self._backend, error.results)
            return None
