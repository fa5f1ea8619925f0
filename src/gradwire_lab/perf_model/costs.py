"""Costs: how long a step takes, for each way to synchronize, on a cluster that need not exist.

Every parcel of the model makes a trip: to encode it, one act for each collective, to decode it; what that costs is
shared out by elements. `timeline.play` plays all trips beside the backward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeAlias

from gradwire.engine.plan import LAUNCH_BYTES
from gradwire_lab.perf_model.calibration import Calibration, Cost
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.model import DENSE, Model, Parcel
from gradwire_lab.perf_model.script import Message, sent_by
from gradwire_lab.perf_model.timeline import Act, Split, Trip, play

CLEARLY = 0.97
LAUNCHES = (LAUNCH_BYTES, 16 * LAUNCH_BYTES)  # large ones leave late, but start fewer kernels and collectives

Actor: TypeAlias = Callable[[Message], Act]
Acts: TypeAlias = Callable[[Parcel, Cost], tuple[Act, ...]]


@dataclass(frozen=True)
class Prediction:
    """One way to synchronize, in one place.

    Attributes:
        spec: Which way; one of `DENSE`, or a spec.
        split: Where the seconds go.
        sent: Bytes that a worker sends in a step; hierarchically, one of each host.
        collectives: How many.
        launch_bytes: Of gradients that travel together.
    """

    spec: str
    split: Split
    sent: float
    collectives: int
    launch_bytes: int

    @property
    def seconds(self) -> float:
        return self.split.step


def predict(
    calibration: Calibration,
    spec: str,
    cluster: Cluster,
    overlaps: bool = True,
    launches: Sequence[int] = LAUNCHES,
) -> Prediction:
    """The step of one way to synchronize, all workers in one exchange, with the best of some sizes of launches."""
    act = _actor(calibration, cluster.flat, cluster.workers)
    sized = partial(_sized, calibration, spec, cluster.workers, overlaps, lambda parcel, cost: _acts(parcel, cost, act))
    return _best(calibration.model, spec, sized, launches)


def predict_across(
    calibration: Calibration,
    spec: str,
    cluster: Cluster,
    overlaps: bool = True,
    launches: Sequence[int] = LAUNCHES,
) -> Prediction:
    """The same with a dense mean inside every host first, so that only hosts exchange messages."""
    across = _actor(calibration, cluster.between, cluster.hosts)
    inside = _actor(calibration, cluster.within, cluster.per_host)
    share = 1 / cluster.per_host

    def acts(parcel: Parcel, cost: Cost) -> tuple[Act, ...]:
        """Every worker of a host serves its share: mates hand it their gradients, and hear what came of them."""
        swap = inside(Message("all_to_all", 4 * parcel.scene.elements * (1 - share)))
        served = replace(cost, encode=cost.encode * share, decode=cost.decode * share)
        return swap, *_acts(parcel, served, across), swap

    def plain(parcel: Parcel, cost: Cost) -> tuple[Act, ...]:
        (message,) = parcel.scene.messages
        return inside(message), *_acts(parcel, cost, across)

    sized = partial(_sized, calibration, spec, cluster.hosts, overlaps, plain if spec in DENSE else acts)
    return _best(calibration.model, spec, sized, launches)


def _best(model: Model, spec: str, sized: Callable[[int], Prediction], launches: Sequence[int]) -> Prediction:
    """With large launches where those are clearly faster; DDP's buckets are as they are."""
    usual, *others = launches
    found = sized(usual)
    if spec in DENSE or model.elements * 4 <= usual:
        return found
    for other in map(sized, others):
        found = other if other.seconds < CLEARLY * found.seconds else found
    return found


def _sized(
    calibration: Calibration, spec: str, world: int, overlaps: bool, acts: Acts, launch_bytes: int
) -> Prediction:
    cost = calibration.cost(spec, world)
    parcels = calibration.model.parcels(spec, world, launch_bytes)
    trips = [Trip(parcel.ready, acts(parcel, cost)) for parcel in parcels]
    split = play(calibration.forward, calibration.backward, trips, calibration.cores, overlaps)
    messages = [_filled(message, cost.fill) for parcel in parcels for message in parcel.scene.messages]
    sent = sum(sent_by(message, world) for message in messages)
    return Prediction(spec, split, sent, len(messages), launch_bytes)


def _acts(parcel: Parcel, cost: Cost, act: Actor) -> tuple[Act, ...]:
    sent = (act(_filled(message, cost.fill)) for message in parcel.scene.messages)
    encode = Act("encode", cost.start + cost.encode * parcel.share)
    return encode, *sent, Act("decode", cost.decode * parcel.share)


def _actor(calibration: Calibration, wire: Callable[[Message], float], world: int) -> Actor:
    """How long messages take among so many; most parcels send the same ones."""
    software = calibration.software

    @cache
    def act(message: Message) -> Act:
        return Act("wire", software.work(message, world), wire(message) + software.hold(message, world))

    return act


def _filled(message: Message, fill: float) -> Message:
    """A message of varying length as long as such messages have been."""
    if fill == 1.0 or message.kind != "all_gather":
        return message
    return Message(message.kind, message.nbytes * fill, message.dtype)
