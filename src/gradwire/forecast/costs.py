"""Costs: how long a step takes, for each way to synchronize, on a cluster that need not exist.

trips     what DDP would send as buckets, and gradwire as launches, each when its last gradient is there
acts      encode, one act for each collective, decode; of a launch, by its share of the elements
step      the trips played beside the backward pass (`timeline.play`)
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

import torch

from gradwire.forecast.calibration import DENSE, Calibration, Cost
from gradwire.forecast.cluster import Cluster
from gradwire.forecast.script import Message, Scene, script, sent_by
from gradwire.forecast.timeline import Act, Split, Trip, play
from gradwire.sync.plan import LAUNCH_BYTES, Plan, build, default_rules

_FIRST_BUCKET = 2**20  # bytes: DDP's first bucket is small, so that something is on the wire early
_BUCKET = 25 * 2**20
_SETTLED = 10**9  # a step at which all warm-up is over

Shapes: TypeAlias = tuple[tuple[str, tuple[int, ...]], ...]


@dataclass(frozen=True)
class Prediction:
    """One way to synchronize, in one place.

    Attributes:
        spec: Which way; one of `DENSE`, or a spec.
        split: Where the seconds go.
        sent: Bytes that a host's link carries away for one worker in a step.
        collectives: How many.
    """

    spec: str
    split: Split
    sent: float
    collectives: int

    @property
    def seconds(self) -> float:
        return self.split.step


def predict(calibration: Calibration, spec: str, cluster: Cluster, *, overlaps: bool = True) -> Prediction:
    """The step of one way to synchronize, all workers in one exchange."""
    scenes, cost = _told(calibration, spec, cluster.workers)
    trips = [_trip(calibration, scene, cost, cluster.flat) for scene in scenes]
    return _played(calibration, spec, trips, scenes, cluster.workers, overlaps)


def predict_across(calibration: Calibration, spec: str, cluster: Cluster, *, overlaps: bool = True) -> Prediction:
    """The same with a dense sum inside every host first, so that only hosts exchange messages."""
    scenes, cost = _told(calibration, spec, cluster.hosts)
    trips = []
    for scene in scenes:
        trip = _trip(calibration, scene, cost, cluster.between)
        inside = _act(Message("all_reduce", 4 * scene.elements, torch.float32), calibration, cluster.within)
        trips.append(Trip(trip.ready, (inside, *trip.acts)))
    return _played(calibration, spec, trips, scenes, cluster.hosts, overlaps)


def _played(
    calibration: Calibration,
    spec: str,
    trips: Sequence[Trip],
    scenes: Sequence[Scene],
    world: int,
    overlaps: bool,
) -> Prediction:
    split = play(calibration.forward, calibration.backward, trips, calibration.cores, overlaps)
    messages = [message for scene in scenes for message in scene.messages]
    fill = calibration.cost(spec, world).fill
    total = sum(sent_by(_filled(message, fill), world) for message in messages)
    return Prediction(spec, split, total if world > 1 else 0.0, len(messages))


def _told(calibration: Calibration, spec: str, world: int) -> tuple[tuple[Scene, ...], Cost]:
    shapes = tuple(calibration.shapes.items())
    return scenes_of(shapes, spec, world), calibration.cost(spec, world)


def _trip(calibration: Calibration, scene: Scene, cost: Cost, wire: Callable[[Message], float]) -> Trip:
    share = scene.elements / calibration.elements
    sent = (_act(_filled(message, cost.fill), calibration, wire) for message in scene.messages)
    acts = (Act("encode", cost.encode * share), *sent, Act("decode", cost.decode * share))
    return Trip(max(calibration.arrival[name] for name in scene.names), acts)


def _act(message: Message, calibration: Calibration, wire: Callable[[Message], float]) -> Act:
    software = calibration.software
    return Act("wire", software.work(message), wire(message) + software.hold(message))


def _filled(message: Message, fill: float) -> Message:
    return message if message.kind != "all_gather" else Message(message.kind, message.nbytes * fill)


def plan_of(shapes: Shapes, spec: str, world: int) -> Plan:
    """The plan that `gradwire.compress` makes of a spec."""
    return build(dict(shapes), default_rules(spec), world, LAUNCH_BYTES)


@lru_cache(maxsize=4096)
def scenes_of(shapes: Shapes, spec: str, world: int) -> tuple[Scene, ...]:
    """What is sent in a step, once all warm-up is over."""
    if spec in DENSE:
        return buckets(shapes, spec)
    return script(plan_of(shapes, spec, world), _SETTLED)


def buckets(shapes: Shapes, spec: str) -> tuple[Scene, ...]:
    """What DDP sends: gradients in the reverse order of registration, a bucket closed once it is full."""
    dtype = torch.bfloat16 if spec == "ddp bf16" else torch.float32
    return tuple(_bucket(names, dict(shapes), dtype) for names in _filled_buckets(shapes))


def _filled_buckets(shapes: Shapes) -> Iterator[list[str]]:
    held, nbytes, limit = [], 0, _FIRST_BUCKET
    for name, shape in reversed(shapes):
        held.append(name)
        nbytes += 4 * math.prod(shape)
        if nbytes >= limit:
            yield held
            held, nbytes, limit = [], 0, _BUCKET
    if held:
        yield held


def _bucket(names: Sequence[str], shapes: dict[str, tuple[int, ...]], dtype: torch.dtype) -> Scene:
    elements = sum(math.prod(shapes[name]) for name in names)
    return Scene(tuple(names), elements, (Message("all_reduce", elements * dtype.itemsize, dtype),))
