"""Graph buffers: the memory that captured buckets read and write, and that outlives a replay."""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gradwire.core.layout import Places
from gradwire.engine.capture import Captured, CaptureError
from gradwire.engine.drive import Rounds
from gradwire.engine.lane import LaneResult
from gradwire.engine.state import Generation, LaneState
from gradwire.engine.status import CORRUPT
from gradwire.engine.step import BucketResult
from gradwire.engine.views import GradViews

MAX_CAPTURES = 4  # captures that did not last, after which a bucket runs eagerly for good
REPLAYS_PER_CAPTURE = 100  # replays that make up for a capture


@dataclass
class CapturedBucket:
    """A bucket's step, and what each replay adds to the accounts."""

    captured: Captured[BucketResult]
    encoded: Counter[str]
    dense: Counter[str]


@dataclass
class BucketCaptures:
    """What is captured of one bucket.

    Attributes:
        captures: By what a capture depends on: generations of state, encoders, addresses.
        staging: Buffers of the bucket's own, by lane, where gradients come to moving addresses.
    """

    captures: dict[Hashable, CapturedBucket] = field(default_factory=dict)
    staging: list[GradViews] | None = None
    eager: int = 0
    replays: int = 0
    moves: int = 0
    tries: int = MAX_CAPTURES
    places: Places = ()

    def forget(self) -> None:
        """Run eagerly for a while, and capture again."""
        self.tries = MAX_CAPTURES if self.replays > REPLAYS_PER_CAPTURE else self.tries - bool(self.captures)
        self.captures.clear()
        self.eager = self.replays = 0


@dataclass(frozen=True)
class GraphOutputs:
    """Where that goes which outlives a captured bucket: not to memory that graphs share.

    Attributes:
        storage: By lane: storage of new memories. It may be the state's own.
        own_status: This rank's status: captured buckets have all their gradients.
        status: Of all ranks.
    """

    storage: list[Generation]
    own_status: Tensor
    status: Tensor

    @classmethod
    def of(cls, states: Sequence[LaneState], rollback: bool, device: torch.device) -> "GraphOutputs":
        storage = [_storage_of(state) if rollback else state.front for state in states]
        own_status, status = torch.zeros(2, dtype=torch.uint8, device=device).split(1)
        return cls(storage, own_status, status.view(()))

    def keep(
        self, rounds: Rounds[BucketResult], states: Sequence[LaneState], corrupt: Sequence[Tensor], corrupt_bit: Tensor
    ) -> Rounds[BucketResult]:
        """The same rounds with their result here. A corrupt message sets ``corrupt_bit``, for later rounds."""
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
            lanes.append(LaneResult(torch.empty(0), new, None if new is state.front else state.front))
        return result._replace(lanes=lanes, status=self.status, captured=True)


def _storage_of(state: LaneState) -> Generation:
    """Storage for the next generation of a lane's memories."""
    if state.back is not None and state.back.tensors.keys() == state.tensors.keys():
        return state.back
    return Generation({name: torch.empty_like(x) for name, x in state.tensors.items()})


@contextmanager
def undo_on_failure(states: Sequence[LaneState], rollback: bool) -> Iterator[None]:
    """If a capture fails that changes the state in place, it will be done again: undo what it has changed."""
    if rollback:
        yield
        return
    try:
        before = [(x, x.clone()) for state in states for x in state.tensors.values()]
    except torch.OutOfMemoryError as error:  # there is room for the training only
        raise CaptureError([], permanent=False) from error
    try:
        yield
    except CaptureError:
        for now, was in before:
            now.copy_(was)
        raise


def staging_of(view: GradViews, device: torch.device) -> GradViews:
    """A buffer for the gradients of a lane, end to end, in float32."""
    flat = torch.empty(sum(x.numel() for x in view.grads), device=device)
    parts = flat.split([x.numel() for x in view.grads])
    return GradViews([part.view(x.shape) for part, x in zip(parts, view.grads, strict=True)], device)


def detached(grad: Tensor | None) -> Tensor:
    assert grad is not None
    return grad.detach()
