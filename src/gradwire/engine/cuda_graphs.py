"""CUDA graphs: the executor of steps, which captures the step of each bucket once where it can, and replays it.

A graph knows addresses, not names. A bucket is captured once for each generation of its state, since a step reads one
and writes the other; without rollback, or without state, once. Gradients are read and written where they lie as long as
they come to the same addresses. Where `zero_grad()` sets gradients to None and addresses move, they are copied to a
buffer of the bucket's own before the replay, and the update is copied back (`engine/staging.py`): 16 bytes of memory
traffic and 4 bytes of memory a parameter. Where gradients can become views of that buffer, nothing is copied back.

    steps 1 to 3     run eagerly: kernels are compiled; so do the first 3 after the codecs have changed
    then             capture, which also runs the step; eagerly again if it fails
    every other step replay, if state and addresses are those of a capture; else eagerly

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
from gradwire.core.layout import MemoryLayout, memory_layout, without_gaps
from gradwire.engine.capture import Captured, CaptureError, Collectives, DeviceGraph, capture, in_collectives, resume
from gradwire.engine.drive import Clock, execute
from gradwire.engine.gradients import FixedGrads, Grads, views_of
from gradwire.engine.graph_buffers import (
    MAX_CAPTURES,
    BucketCaptures,
    CapturedBucket,
    CapturedCommit,
    GraphOutputs,
    StepCounter,
    undo_if_skipped,
    undo_on_failure,
)
from gradwire.engine.hosts import AnyEngine
from gradwire.engine.staging import Staging
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
        self._counter = StepCounter(engine.unwrapped.device)
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
        if bucket.taken_in is not grads:  # those of a pass that failed
            bucket.taken_in = None
        where = None if self._graphs is None else self._layout_for_capture(i, grads)
        if where is None:
            return self._eager(i, grads)
        encoders = self._encoders(i)
        if encoders != bucket.encoders:  # their kernels and tables are not made yet, and no capture can make them
            self._forget(bucket)
            bucket.encoders, bucket.tries = encoders, MAX_CAPTURES  # these were never captured
        signature = self._signature(i, where)
        captured = bucket.captures.get(signature)
        if captured is not None:
            bucket.replays += 1
            bucket.fill_staging(grads)
            return self._replay(i, captured)
        if len(bucket.captures) >= 2:  # the state was replaced
            self._forget(bucket)
        if bucket.eager < EAGER_STEPS or bucket.tries <= 0 or self.replayed:
            bucket.eager += 1
            return self._eager(i, grads)
        bucket.fill_staging(grads)
        return self._capture(i, grads, signature)

    def take_in(self, i: int, grads: Grads) -> list[Tensor] | None:
        """Move the gradients of a bucket to where its captured work reads them, so that no update is copied back.

        Call it before `run_bucket`, on the same stream, with all gradients of the bucket.

        Returns:
            Tensors to replace the gradients, in order of the bucket's names; None: the gradients stay. Keep the old
            ones until all work of the step is done: they may not have been copied yet.
        """
        bucket = self._buckets[i]
        self._leave_kept_views(bucket, grads)
        if bucket.staging is None or not bucket.captures or not bucket.staging.allows_views:
            return None
        bucket.taken_in = grads
        return bucket.staging.take_in(grads)

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

    def _layout_for_capture(self, i: int, grads: Grads) -> MemoryLayout | None:
        """Where captured work finds the gradients of a bucket; None if the step cannot be captured.

        All gradients must be there, and no lane may have a carried error, observed moments or a delayed mean. Gradients
        that keep coming to other addresses, or have gaps, are staged in a buffer of the bucket's own; then addresses do
        not matter.
        """
        bucket, inner, lanes = self._buckets[i], self.engine.unwrapped, self.engine.full_plan.buckets[i]
        passing = any(state.carried_error is not None or state.observed is not None for state in inner.states_of(i))
        if passing or any(lane.at(inner.step)[1].delays or lane.refreshes(inner.step) for lane in lanes):
            return None
        if bucket.taken_in is not None:
            return ()
        if grads is bucket.fixed:
            return bucket.memory_layout if bucket.staging is None else ()
        where = self._inspect_layout(i, grads)
        bucket.fixed = grads if where is not None and isinstance(grads, FixedGrads) else None
        return where

    def _inspect_layout(self, i: int, grads: Grads) -> MemoryLayout | None:
        """The same, from the gradients themselves."""
        bucket, inner, lanes = self._buckets[i], self.engine.unwrapped, self.engine.full_plan.buckets[i]
        names = self.engine.full_plan.bucket_names[i]
        dense = [grad for name in names if (grad := grads[name]) is not None and grad.layout == torch.strided]
        if len(dense) < len(names):
            return None
        self._leave_kept_views(bucket, grads)
        if bucket.staging is not None:
            return ()
        where = memory_layout(dense)
        bucket.stays = where == bucket.memory_layout
        if bucket.stays:
            return where
        if any(x.device != inner.device for x in dense):
            return None
        bucket.moves += bool(bucket.memory_layout)
        bucket.memory_layout = where
        if bucket.moves <= MAX_ADDRESS_CHANGES and all(map(without_gaps, dense)):
            return where
        self._forget(bucket)
        bucket.tries, bucket.eager = MAX_CAPTURES, EAGER_STEPS
        bucket.staging = Staging.of(names, [views_of(lane, grads, inner.device) for lane in lanes], inner.device)
        bucket.staging.allows_views &= bucket.allows_views
        return ()

    def _signature(self, i: int, where: MemoryLayout) -> Hashable:
        return tuple(state.current for state in self.engine.unwrapped.states_of(i) if state.tensors), where

    def _encoders(self, i: int) -> tuple[int, ...]:
        """The encoders, by identity: comparing them takes long, and lanes keep them alive."""
        inner = self.engine.unwrapped
        return tuple([id(lane.encoder(inner.step)) for lane in inner.plan.buckets[i]])

    def _leave_kept_views(self, bucket: BucketCaptures, grads: Grads) -> None:
        """Stage in another buffer from now on, if the loop has kept views of this one beyond their step."""
        if bucket.staging is not None and not bucket.staging.is_free(grads):
            self._forget(bucket)
            bucket.staging, bucket.allows_views = None, False

    def _copy_from_staging(self, grads: Grads, outcome: StepResult) -> StepResult:
        """Copy updates from buffers of buckets to where the gradients lie."""
        staged = [bucket.staging for bucket in self._buckets if bucket.staging and bucket.taken_in is None]
        updates = dict(outcome.updates) if staged else outcome.updates
        for staging in staged:
            staging.copy_back(grads, updates)
        for bucket in self._buckets:
            bucket.taken_in = None
        return StepResult(updates, outcome.skipped)

    # -- running -------------------------------------------------------------------------------------------------------

    def _eager(self, i: int, grads: Grads) -> BucketResult:
        self._commits.clear()
        return execute(self.engine.run_bucket(i, self._buckets[i].fixed_grads(grads)), self._backend, self._clock)

    def _replay(self, i: int, bucket: CapturedBucket) -> BucketResult:
        inner, clock = self.engine.unwrapped, Clock()
        self._counter.set(inner.step)
        result = bucket.captured.replay(self._backend, clock)
        self._clock.add(clock)
        inner.accounting.add(bucket.encoded, bucket.dense)
        lanes = inner.plan.buckets[i]
        total = sum(lane.units.total for lane in lanes)
        for lane in lanes:  # the time of one graph is shared out by size
            inner.accounting.seconds[lane.label].add(clock, lane.units.total / max(total, 1), wire=False)
        return result

    # -- capturing -----------------------------------------------------------------------------------------------------

    def _capture(self, i: int, grads: Grads, signature: Hashable) -> BucketResult:
        assert self._graphs is not None
        inner, bucket = self.engine.unwrapped, self._buckets[i]
        lanes, fixed = self.engine.full_plan.buckets[i], bucket.fixed_grads(grads)
        views = bucket.staging.views if bucket.staging else [views_of(lane, fixed, inner.device) for lane in lanes]
        states, accounting = inner.states_of(i), inner.accounting
        encoded, dense = accounting.encoded.copy(), accounting.dense.copy()
        outputs = GraphOutputs.of(states, inner.rollback, inner.device)
        random = replace(inner.key, device_counter=self._counter.set(inner.step))

        def again() -> Collectives[BucketResult]:
            fresh = [GradViews(view.grads, inner.device, stays=view.stays) for view in views]
            rounds = self.engine.bucket_rounds(i, fresh, outputs.own_status, outputs.storage, random)
            return in_collectives(outputs.keep(rounds, states, corrupt, inner.skipped_steps.corrupt_bit), self._backend)

        with defer_checks() as corrupt:
            try:
                with undo_on_failure(states, inner.rollback, views):
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
        """Run the bucket eagerly. One that draws random bits on the host is never captured again."""
        self._forget(bucket)
        bucket.tries = 0 if error.permanent else bucket.tries - 1
        if not error.permanent:
            _log.warning("gradwire: a bucket could not be captured (%s); it runs eagerly", error.__cause__)

    # -- commits that read nothing -------------------------------------------------------------------------------------

    def _commit(self, results: Sequence[BucketResult]) -> dict[str, Tensor]:
        """Commit without reading the status: the device undoes a bad step. Returns the updates by name."""
        inner = self.engine.unwrapped
        signature = tuple(map(id, results))  # of captures: the table is cleared whenever one is forgotten
        commit = self._commits.get(signature)
        commit = commit or CapturedCommit(None, named_updates(self.engine.full_plan.lanes, results), runs=0)
        settled = commit.captured is not None or commit.runs > 1
        if commit.captured is not None:
            commit.captured.replay(self._backend, Clock())
        elif commit.runs == 1 and not self.replayed:
            commit = commit._replace(captured=self._capture_commit(results), runs=2)
        else:
            resume(undo_if_skipped(self.engine, self._backend, results), self._backend)
            commit = commit._replace(runs=max(commit.runs, 1))
        self._commits[signature] = commit
        self.replayed = settled
        for state, lane in zip(inner.states, (lane for result in results for lane in result.lanes), strict=True):
            state.commit(lane.new, lane.spare)
        inner.step += 1
        inner.skipped_steps.poll()
        return commit.updates

    def _capture_commit(self, results: Sequence[BucketResult]) -> Captured[None] | None:
        """Capture the commit, once it has run eagerly: a capture may not be the first launch of a kernel."""
        assert self._graphs is not None
        try:
            return capture(undo_if_skipped(self.engine, self._backend, results), self._backend, self._graphs)
        except CaptureError as error:
            _log.warning("gradwire: the end of a step could not be captured (%s); it runs eagerly", error.__cause__)
            resume(undo_if_skipped(self.engine, self._backend, results), self._backend, error.results)
            return None
