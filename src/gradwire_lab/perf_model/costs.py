"""Costs: how long a step takes, for each way to synchronize, on a cluster that need not exist.

Every bucket of the model is encoded, exchanged by its collectives, and decoded; coding costs are shared out by
elements. `timeline.simulate_step` runs all buckets beside the backward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TypeAlias

from gradwire.engine.plan import BUCKET_BYTES
from gradwire_lab.perf_model.calibration import Calibration, CodingCost
from gradwire_lab.perf_model.candidates import local_rounds
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.comm_schedule import BucketSchedule, sent_by
from gradwire_lab.perf_model.loopback import CollectiveCall
from gradwire_lab.perf_model.model import DENSE
from gradwire_lab.perf_model.timeline import BucketTimeline, CommWork, StepTime, simulate_step

CLEARLY = 0.97
BUCKET_SIZES = (BUCKET_BYTES, 16 * BUCKET_BYTES)  # large ones leave late, but start fewer kernels and collectives

WorkOf: TypeAlias = Callable[[CollectiveCall], CommWork]
BucketWork: TypeAlias = Callable[[BucketSchedule, CodingCost], tuple[CommWork, ...]]


@dataclass(frozen=True)
class Prediction:
    """One way to synchronize, in one place.

    Attributes:
        spec: Which way; one of `DENSE`, or a spec.
        split: Where the seconds go.
        sent: Bytes that a worker sends in a step; hierarchically, one of each host.
        collectives: How many.
        bucket_bytes: Of gradients that travel together.
    """

    spec: str
    split: StepTime
    sent: float
    collectives: int
    bucket_bytes: int

    @property
    def seconds(self) -> float:
        return self.split.step

    def shared(self, steps: int) -> "Prediction":
        """Where all that is sent serves so many steps."""
        return replace(self, split=self.split.shared(steps), sent=self.sent / steps)


def predict(
    calibration: Calibration,
    spec: str,
    cluster: Cluster,
    overlaps: bool = True,
    bucket_sizes: Sequence[int] = BUCKET_SIZES,
    across: bool = False,
) -> Prediction:
    """The step of one way to synchronize; of local steps, with its share of a round.

    Args:
        calibration: Of the model and the machine.
        spec: One of `DENSE`, or a spec.
        cluster: Where.
        overlaps: Whether messages leave during the backward pass.
        bucket_sizes: Sizes; the larger are taken where they are clearly faster. DDP's buckets are as they are.
        across: Whether every host computes a dense mean first, so that only hosts exchange messages; otherwise all
            workers take part in one exchange.
    """
    world = cluster.hosts if across else cluster.workers
    exchange = _work_of(calibration, cluster.between if across else cluster.flat, world)
    inside = _work_of(calibration, cluster.within, cluster.per_host)
    share = 1 / cluster.per_host

    def work(bucket: BucketSchedule, cost: CodingCost) -> tuple[CommWork, ...]:
        if not across:
            return _bucket_work(bucket, cost, exchange)
        if spec in DENSE:
            return inside(bucket.calls[0]), *_bucket_work(bucket, cost, exchange)
        # Every worker of a host serves its share: the others send it their gradients, and receive the update.
        swap = inside(CollectiveCall("all_to_all", 4 * bucket.elements * (1 - share)))
        return swap, *_bucket_work(bucket, cost.share(share), exchange), swap

    rounds = None if spec in DENSE else local_rounds(spec.partition(";")[0])  # which begin when a step is over
    sized = partial(_sized, calibration, spec, world, overlaps and rounds is None, work)
    best = sized(bucket_sizes[0])
    if spec not in DENSE and calibration.model.elements * 4 > bucket_sizes[0]:
        for other in map(sized, bucket_sizes[1:]):
            best = other if other.seconds < CLEARLY * best.seconds else best
    return best if rounds is None else best.shared(rounds.H)


predict_across = partial(predict, across=True)


def _sized(
    calibration: Calibration, spec: str, world: int, overlaps: bool, work: BucketWork, bucket_bytes: int
) -> Prediction:
    cost = calibration.cost(spec, world)
    buckets = calibration.model.buckets(spec, world, bucket_bytes)
    timelines = [
        BucketTimeline(bucket.ready, work(bucket, cost.share(bucket.elements / calibration.model.elements)))
        for bucket in buckets
    ]
    split = simulate_step(calibration.forward, calibration.backward, timelines, calibration.cores, overlaps)
    calls = [_filled(call, cost.fill) for bucket in buckets for call in bucket.calls]
    sent = sum(sent_by(call, world) for call in calls)
    return Prediction(spec, split, sent, len(calls), bucket_bytes)


def _bucket_work(bucket: BucketSchedule, cost: CodingCost, work_of: WorkOf) -> tuple[CommWork, ...]:
    sent = (work_of(_filled(call, cost.fill)) for call in bucket.calls)
    return CommWork("encode", cost.start + cost.encode), *sent, CommWork("decode", cost.decode)


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
