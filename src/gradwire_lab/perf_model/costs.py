"""Costs: how long a step takes, for each way to synchronize, on a cluster that need not exist.

Every bucket of the model is encoded, exchanged by its collectives, and decoded; coding costs are shared out by
elements. `timeline.play` runs all buckets beside the backward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeAlias

from gradwire.engine.plan import LAUNCH_BYTES
from gradwire_lab.perf_model.calibration import Calibration, CodingCost
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.comm_schedule import sent_by
from gradwire_lab.perf_model.loopback import CollectiveCall
from gradwire_lab.perf_model.model import DENSE, ModelProfile, ReadyBucket
from gradwire_lab.perf_model.timeline import BucketTimeline, CommWork, StepTime, play

CLEARLY = 0.97
LAUNCHES = (LAUNCH_BYTES, 16 * LAUNCH_BYTES)  # large ones leave late, but start fewer kernels and collectives

WorkOf: TypeAlias = Callable[[CollectiveCall], CommWork]
BucketWork: TypeAlias = Callable[[ReadyBucket, CodingCost], tuple[CommWork, ...]]


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
    split: StepTime
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
    work_of = _work_of(calibration, cluster.flat, cluster.workers)
    sized = partial(
        _sized, calibration, spec, cluster.workers, overlaps, lambda bucket, cost: _bucket_work(bucket, cost, work_of)
    )
    return _best(calibration.model, spec, sized, launches)


def predict_across(
    calibration: Calibration,
    spec: str,
    cluster: Cluster,
    overlaps: bool = True,
    launches: Sequence[int] = LAUNCHES,
) -> Prediction:
    """The same with a dense mean inside every host first, so that only hosts exchange messages."""
    across = _work_of(calibration, cluster.between, cluster.hosts)
    inside = _work_of(calibration, cluster.within, cluster.per_host)
    share = 1 / cluster.per_host

    def work(bucket: ReadyBucket, cost: CodingCost) -> tuple[CommWork, ...]:
        """Every worker of a host serves its share: the others send it their gradients, and receive the update."""
        swap = inside(CollectiveCall("all_to_all", 4 * bucket.elements * (1 - share)))
        served = replace(cost, encode=cost.encode * share, decode=cost.decode * share)
        return swap, *_bucket_work(bucket, served, across), swap

    def plain(bucket: ReadyBucket, cost: CodingCost) -> tuple[CommWork, ...]:
        (call,) = bucket.calls
        return inside(call), *_bucket_work(bucket, cost, across)

    sized = partial(_sized, calibration, spec, cluster.hosts, overlaps, plain if spec in DENSE else work)
    return _best(calibration.model, spec, sized, launches)


def _best(model: ModelProfile, spec: str, sized: Callable[[int], Prediction], launches: Sequence[int]) -> Prediction:
    """With large launches where those are clearly faster; DDP's buckets are as they are."""
    usual, *others = launches
    found = sized(usual)
    if spec in DENSE or model.elements * 4 <= usual:
        return found
    for other in map(sized, others):
        found = other if other.seconds < CLEARLY * found.seconds else found
    return found


def _sized(
    calibration: Calibration, spec: str, world: int, overlaps: bool, work: BucketWork, launch_bytes: int
) -> Prediction:
    cost = calibration.cost(spec, world)
    buckets = calibration.model.buckets(spec, world, launch_bytes)
    timelines = [BucketTimeline(bucket.ready, work(bucket, cost)) for bucket in buckets]
    split = play(calibration.forward, calibration.backward, timelines, calibration.cores, overlaps)
    calls = [_filled(call, cost.fill) for bucket in buckets for call in bucket.calls]
    sent = sum(sent_by(call, world) for call in calls)
    return Prediction(spec, split, sent, len(calls), launch_bytes)


def _bucket_work(bucket: ReadyBucket, cost: CodingCost, work_of: WorkOf) -> tuple[CommWork, ...]:
    sent = (work_of(_filled(call, cost.fill)) for call in bucket.calls)
    encode = CommWork("encode", cost.start + cost.encode * bucket.share)
    return encode, *sent, CommWork("decode", cost.decode * bucket.share)


def _work_of(calibration: Calibration, wire: Callable[[CollectiveCall], float], world: int) -> WorkOf:
    """How long collectives take among so many; most buckets have the same ones."""
    software = calibration.software

    @cache
    def work_of(call: CollectiveCall) -> CommWork:
        return CommWork("wire", software.work(call, world), wire(call) + software.hold(call, world))

    return work_of


def _filled(call: CollectiveCall, fill: float) -> CollectiveCall:
    """A message of varying length, as long as such messages have been."""
    if fill == 1.0 or call.kind != "all_gather":
        return call
    return CollectiveCall(call.kind, call.nbytes * fill, call.dtype)
