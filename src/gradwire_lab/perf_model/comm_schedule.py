"""The communication schedule of a plan: its collectives at a step, bucket by bucket, and their bytes.

The exchanges themselves run, on tensors without content, so that a schedule can be made for models and worlds that fit
on no machine at hand, and a new exchange needs no line here. Where only the data decide the length of a message, the
schedule has the longest.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor

from gradwire.codecs.codec import Codec
from gradwire.codecs.encoding import Encoded
from gradwire.codecs.stage import EncodeInput
from gradwire.comm.backend import Backend
from gradwire.core.keys import Key
from gradwire.core.payload import Payload
from gradwire.core.requests import CommGenerator, Gather, Max, Request
from gradwire.core.segments import Segments
from gradwire.engine.batched import status_beside
from gradwire.engine.drive import Clock, execute, interleave
from gradwire.engine.lane import Lane
from gradwire.engine.plan import Plan
from gradwire.exchanges import Aggregate, CommContext
from gradwire.exchanges.batch import META, blank
from gradwire_lab.perf_model.loopback import CollectiveCall, LoopbackBackend

SETTLED = 10**9  # a step at which all warm-up is over
_EXACT = 16  # ranks; larger worlds are extrapolated, since an exchange may cut its buffer into a slice for each rank


@dataclass(frozen=True)
class BucketSchedule:
    """Gradients that are exchanged together.

    Attributes:
        names: Of the parameters.
        elements: How many.
        calls: The collectives that carry them, in order.
        ready: When in the backward pass the last gradient is there, 0 to 1.
    """

    names: tuple[str, ...]
    elements: int
    calls: tuple[CollectiveCall, ...]
    ready: float = 1.0


def schedule(plan: Plan, step: int) -> tuple[BucketSchedule, ...]:
    """The whole step of one rank."""
    return tuple(_bucket(lanes, plan.world, step) for lanes in plan.buckets)


def sent(buckets: Iterable[BucketSchedule], world: int) -> float:
    """Bytes that one rank puts on the wire, by what gloo and NCCL's rings do."""
    return sum(sent_by(call, world) for bucket in buckets for call in bucket.calls)


def sent_by(call: CollectiveCall, world: int) -> float:
    """The same for one collective."""
    if call.kind == "all_reduce":
        return 2 * (world - 1) / world * call.nbytes
    return (world - 1) * call.nbytes if call.kind == "all_gather" else call.nbytes


def _bucket(lanes: Sequence[Lane], world: int, step: int) -> BucketSchedule:
    names = tuple(name for lane in lanes for name in lane.tensors.names)
    calls = _calls(lanes, world, step) if world <= _EXACT else _extrapolated(lanes, world, step)
    return BucketSchedule(names, sum(lane.units.total for lane in lanes), tuple(calls))


def _extrapolated(lanes: Sequence[Lane], world: int, step: int) -> Iterator[CollectiveCall]:
    """By ``bytes = a + b / world``, which holds for slices and for whole messages."""
    few, many = _EXACT // 2, _EXACT
    for small, large in zip(_calls(lanes, few, step), _calls(lanes, many, step), strict=True):
        share = (small.nbytes - large.nbytes) / (1 / few - 1 / many)
        yield replace(large, nbytes=large.nbytes + share * (1 / world - 1 / many))


def _calls(lanes: Sequence[Lane], world: int, step: int) -> tuple[CollectiveCall, ...]:
    """The collectives of a bucket. Buckets of equal shapes have the same."""
    return _calls_of(tuple(map(_unnamed, lanes)), world, step)


@lru_cache(maxsize=4096)
def _calls_of(lanes: tuple[Lane, ...], world: int, step: int) -> tuple[CollectiveCall, ...]:
    """Round by round, what `fuse` makes of the requests of all lanes."""
    backend = LoopbackBackend(world, META)
    for requests in zip_longest(*(_requests(lane, world, step) for lane in lanes)):
        _answer([one for one in requests if one is not None], backend)
    return tuple(backend.calls)


@lru_cache(maxsize=4096)
def _requests(lane: Lane, world: int, step: int) -> tuple[Request, ...]:
    """What a lane asks of the group; layers of equal shapes ask the same."""
    recorder = _Recorder(world)
    execute(interleave([_exchange(lane, world, step)]), cast(Backend, recorder), Clock())
    return tuple(recorder.requests)


def _unnamed(lane: Lane) -> Lane:
    tensors, units = (replace(table, names=("",) * len(table)) for table in (lane.tensors, lane.units))
    return replace(lane, label="", tensors=tensors, units=units)


def _exchange(lane: Lane, world: int, step: int) -> CommGenerator[Aggregate]:
    """The exchange of a lane, without content."""
    codec, exchange = lane.at(step)
    context = CommContext(
        Key(0, step, 0), world, lane.units, lane.tensors, lane.feedback.keeps_error, needs_decoded=False
    )
    memory = {name: _vector(sum(slot.lengths)) for name, slot in lane.state_specs(world).items()}
    target, sizes_only = _vector(lane.units.total), cast(Codec, _SizeOnlyCodec(codec))
    message = exchange.encode(EncodeInput(target, target, memory, lane.units), sizes_only, context)
    return exchange.run(message, sizes_only, context)


class _Recorder:
    """Answers requests as a backend does, and keeps them."""

    def __init__(self, world: int) -> None:
        self.requests: list[Request] = []
        self._backend = LoopbackBackend(world, META)

    def answer(self, requests: Sequence[Request]) -> list[Any]:
        self.requests += requests
        return _answer(requests, self._backend)


def _answer(requests: Sequence[Request], backend: LoopbackBackend) -> list[Any]:
    """Answer one round, the first with the status. Lengths are agreed on as `fuse` does, which would read them."""
    sized = [_sized(one) for one in requests]
    varying = sum(one is not known for one, known in zip(requests, sized, strict=True))
    extra: list[Request] = [Max(torch.empty(varying, dtype=torch.int64, device=META))] if varying else []
    if not backend.calls:
        extra.append(status_beside(requests[0], backend.world))
    return backend.answer([*sized, *extra])[: len(requests)]


def _sized(request: Request) -> Request:
    if isinstance(request, Gather) and request.size is None:
        return replace(request, size=request.payload.nbytes)
    return request


class _SizeOnlyCodec:
    """A codec whose messages are as long as they may be, and hold nothing."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._codec, name)

    def encode(self, signal: EncodeInput, key: Key) -> Encoded:
        table, body = signal.segments, self._message(signal.segments).data
        return Encoded(self._codec, key, table, None, table.lengths, body, signal.memory)

    @property
    def decoder(self) -> "_SizeOnlyCodec":
        return self

    def merge(
        self, payloads: object, debt: Tensor | None, segments: Segments, *keys: object
    ) -> tuple[Payload, Tensor | None]:
        return self._message(segments), debt

    def decode(self, messages: object, segments: Segments, *keys: object) -> Tensor:
        return _vector(segments.total)

    mean = total = expand = decode

    def entries(self, *messages: object) -> "_SizeOnlyCodec":
        return self

    def mean_of_senders(self, total: int) -> Tensor:
        return _vector(total)

    def _message(self, segments: Segments) -> Payload:
        return blank(self._codec.size(segments))


def _vector(n: int) -> Tensor:
    return torch.empty(n, device=META)
