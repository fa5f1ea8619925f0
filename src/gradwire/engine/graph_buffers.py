"""Graph buffers: the memory that captured buckets read and write, and that outlives a replay."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.comm.backend import Backend
from gradwire.core.layout import MemoryLayout, stretches
from gradwire.engine import status
from gradwire.engine.capture import Captured, CaptureError, Collectives, in_collectives
from gradwire.engine.drive import RoundGenerator
from gradwire.engine.gradients import FixedGrads, Grads
from gradwire.engine.hosts import AnyEngine
from gradwire.engine.lane import LaneResult
from gradwire.engine.staging import Staging
from gradwire.engine.state import LaneMemory, LaneState
from gradwire.engine.status import CORRUPT
from gradwire.engine.step import BucketResult
from gradwire.engine.views import GradViews
from gradwire.kernels.conditional import copy_if_, zero_if_

MAX_CAPTURES = 4  # captures that became invalid, after which a bucket always runs eagerly
REPLAYS_PER_CAPTURE = 100  # replays that save as much time as a capture takes


@dataclass
class CapturedBucket:
    """A bucket's step, and what each replay adds to the accounts."""

    captured: Captured[BucketResult]
    encoded: Counter[str]
    dense: Counter[str]


class CapturedCommit(NamedTuple):
    """The commit of one set of captured buckets: captured or not yet, its updates by name, how often it was made."""

    captured: Captured[None] | None
    updates: dict[str, Tensor]
    runs: int


class StepCounter:
    """The number of a step on the device, where captured kernels read it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tensor: Tensor | None = None
        self._value = -1

    def set(self, step: int) -> Tensor:
        """Have kernels read this number."""
        if self._tensor is None:
            self._tensor = torch.zeros(2, dtype=torch.int64, device=self._device)
        if self._value != step:
            self._value = step
            self._tensor[:1].fill_(step & 0xFFFFFFFF)
            if step >> 32:
                self._tensor[1].fill_(step >> 32)
        return self._tensor


@dataclass
class BucketCaptures:
    """What is captured of one bucket.

    Attributes:
        captures: By what a capture depends on: generations of state, addresses.
        encoders: What all captures are of, by identity.
        staging: A buffer of the bucket's own, where gradients come to moving addresses.
        allows_views: Whether gradients may become views of that buffer: the loop has kept none beyond its step.
        taken_in: The gradients of the current step, if they have become views of that buffer.
        memory_layout: Where the gradients of the last step lay.
        stays: Whether those of the step before lay there, too.
        fixed: The gradients of the last step, if they stay there.
    """

    captures: dict[Hashable, CapturedBucket] = field(default_factory=dict)
    encoders: tuple[int, ...] = ()
    staging: Staging | None = None
    allows_views: bool = True
    taken_in: Grads | None = None
    eager: int = 0
    replays: int = 0
    moves: int = 0
    tries: int = MAX_CAPTURES
    memory_layout: MemoryLayout = ()
    stays: bool = False
    fixed: FixedGrads | None = None

    def fixed_grads(self, grads: Grads) -> Grads:
        """The gradients, known to be fixed if they lie where they lay at the step before."""
        return FixedGrads(grads) if self.stays else grads

    def fill_staging(self, grads: Grads) -> None:
        """Have captured work find these gradients."""
        if self.staging is not None and self.taken_in is None:
            self.staging.fill(grads)

    def forget(self) -> None:
        """Run eagerly for a while, and capture again."""
        self.tries = MAX_CAPTURES if self.replays > REPLAYS_PER_CAPTURE else self.tries - bool(self.captures)
        self.captures.clear()
        self.eager = self.replays = 0


@dataclass(frozen=True)
class GraphOutputs:
    """Tensors for results that are read after a captured bucket, outside of the memory that graphs share.

    Attributes:
        storage: By lane: storage of new memories. It may be the state's own.
        own_status: This rank's status: captured buckets have all their gradients.
        status: Of all ranks.
    """

    storage: list[LaneMemory]
    own_status: Tensor
    status: Tensor

    @classmethod
    def of(cls, states: Sequence[LaneState], rollback: bool, device: torch.device) -> "GraphOutputs":
        storage = [_next_generation(state) if rollback else state.current for state in states]
        own_status, status = torch.zeros(2, dtype=torch.uint8, device=device).split(1)
        return cls(storage, own_status, status.view(()))

    def keep(
        self,
        rounds: RoundGenerator[BucketResult],
        states: Sequence[LaneState],
        corrupt: Sequence[Tensor],
        corrupt_bit: Tensor,
    ) -> RoundGenerator[BucketResult]:
        """The same rounds, whose result is copied here. A corrupt message sets ``corrupt_bit``, for later rounds."""
        result = yield from rounds
        if corrupt:
            corrupt_bit.bitwise_or_(torch.cat([flag.flatten() for flag in corrupt]).any() * CORRUPT)
        self.status.copy_(result.status)
        lanes = []
        for one, state, new in zip(result.lanes, states, self.storage, strict=True):
            for name, x in one.new.tensors.items():
                if x is not new.tensors.get(name):
                    unchanged = x is state.tensors[name] or name not in new.tensors
                    new.tensors[name] = x if unchanged else new.tensors[name].copy_(x)
            lanes.append(LaneResult(torch.empty(0), new, None if new is state.current else state.current))
        return result._replace(lanes=lanes, status=self.status, captured=True)


def _next_generation(state: LaneState) -> LaneMemory:
    """Storage for the next generation of a lane's memories."""
    if state.spare is not None and state.spare.tensors.keys() == state.tensors.keys():
        return state.spare
    return LaneMemory({name: torch.empty_like(x) for name, x in state.tensors.items()})


@contextmanager
def undo_on_failure(states: Sequence[LaneState], rollback: bool, views: Sequence[GradViews]) -> Iterator[None]:
    """If a capture fails, its bucket will be run again: undo what it has changed.

    That is the state, if it is changed in place, and the gradients of several lanes, of which one may write its update
    before another one fails.
    """
    changed = [] if rollback else [x for state in states for x in state.tensors.values()]
    if len(views) > 1:
        changed += [x for view in views for x in view.grads]
    try:
        before = [(x, x.clone()) for x in changed]
    except torch.OutOfMemoryError as error:  # there is room for the training only
        raise CaptureError([], permanent=False) from error
    try:
        yield
    except CaptureError:
        for now, was in before:
            now.copy_(was)
        raise


def undo_if_skipped(engine: AnyEngine, backend: Backend, results: Sequence[BucketResult]) -> Collectives[None]:
    """Have the device count a step that was skipped, zero its updates, and copy the old state over the new."""
    inner = engine.unwrapped
    statuses = [result.status for result in results]
    if engine.shards > 1:
        statuses = [(yield from in_collectives(status.of_host(statuses), backend))]
    skipped = inner.skipped_steps.count_on_device_(statuses)
    new = [one.new.tensors for result in results for one in result.lanes]
    pairs = [
        (tensors[name], state.tensors[name])
        for tensors, state in zip(new, inner.states, strict=True)
        for name in tensors
        if tensors[name] is not state.tensors[name]
    ]
    zero_if_(skipped, stretches([x for result in results for view in result.views for x in view.grads]))
    copy_if_(skipped, [now for now, _ in pairs], [before for _, before in pairs])
