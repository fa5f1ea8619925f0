"""Wire costs: what the steps of a wire would take with other specs, by the same costs as ``gradwire advise``."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from gradwire.comm.alphabeta import seconds as collective_seconds
from gradwire.comm.host_layout import launcher_place
from gradwire.comm.rates import LinkSpec
from gradwire.integrations.wire import Wire
from gradwire_lab.perf_model.accuracy_records import free_of_losses, in_words, records_of
from gradwire_lab.perf_model.advice import advise
from gradwire_lab.perf_model.calibration import Calibration, CodingCost
from gradwire_lab.perf_model.candidates import automatic
from gradwire_lab.perf_model.cluster import Cluster
from gradwire_lab.perf_model.costs import Prediction, predict
from gradwire_lab.perf_model.local_steps import MESSAGES, LocalAdvice, local_choices, to_take
from gradwire_lab.perf_model.microbenchmark import time_coding
from gradwire_lab.perf_model.model import DENSE, ModelProfile
from gradwire_lab.perf_model.probe import delay_of, fitting
from gradwire_lab.perf_model.timing import cores_per_thread, slowest
from gradwire_lab.perf_model.training_time import STEPS

MOST_MEASURED = 4  # candidates whose coding is worth a pause


@dataclass(frozen=True)
class StepTimes:
    """The median step, in seconds, of the slowest rank."""

    period: float
    backward: float
    exposed: float
    comm: float


@dataclass(frozen=True)
class WireCosts:
    """The cost model of a wire. All ranks call its methods at once.

    Attributes:
        wire: Whose steps.
        overlaps: Whether messages leave during the backward pass.
        ddp_reduces: Whether DDP itself sums the dense gradients.
        link: As the caller describes it; None: as the dense steps show.
    """

    wire: Wire
    overlaps: bool
    ddp_reduces: bool
    link: LinkSpec | None

    @cached_property
    def model(self) -> ModelProfile:
        return ModelProfile.of(self.wire.parameters)

    @property
    def specs(self) -> tuple[str, ...]:
        """What may be tried: nothing that lost accuracy, or that the optimizer would suffer from."""
        found = automatic(bool(self.wire.adaptive))
        for name in self.wire.adaptive or {"SGD"}:
            found = free_of_losses(found, name, self.model.kind)
        return found

    @property
    def optimizer(self) -> str:
        """Whose trainings tell: Muon's, beside which another one steps what is no matrix; SGD's where none adapts."""
        return max(sorted(self.wire.adaptive), key="Muon".__eq__, default="SGD")

    def evidence(self, spec: str) -> str:
        """Which trainings say that a spec may be tried."""
        records = records_of(spec, self.optimizer, self.model.kind)
        return f"accuracy by {in_words(records)}" if records else "never trained"

    def free_coding(self, dense: StepTimes) -> Calibration:
        """A calibration by dense steps, as if coding cost nothing."""
        forward = max(0.0, dense.period - dense.backward - dense.exposed)
        costs = {spec: CodingCost(0.0, 0.0) for spec in (*DENSE[:2], *self.specs, *MESSAGES)}
        place = launcher_place(os.environ)
        cores_here = cores_per_thread(self.wire.device, 1 if place is None else place[1])
        (cores,) = slowest(self.wire.link, [-cores_here])
        return Calibration(self.model, forward, dense.backward, costs, -cores, world=self.wire.setup.plan_world)

    def cluster(self, dense: StepTimes) -> Cluster:
        layout = self.wire.link.host_layout
        link = self.link or fitting(dense.comm, delay_of(self.wire.link), self.dense_seconds)
        return Cluster(self.wire.link.world, link, 1 if layout is None else layout.ranks_per_host)

    def dense_seconds(self, link: LinkSpec) -> float:
        """How long the dense sums of a step take on a link: DDP's own, or those of this wire."""
        setup = self.wire.setup
        spec, world = (DENSE[0], self.wire.link.world) if self.ddp_reduces else ("fp32", setup.plan_world)
        buckets = self.model.buckets(spec, world, setup.options.bucket_bytes)
        return sum(
            collective_seconds("all_reduce", call.nbytes, world, link) for bucket in buckets for call in bucket.calls
        )

    def predict(self, calibration: Calibration, spec: str, cluster: Cluster) -> Prediction:
        bucket_sizes = (self.wire.setup.options.bucket_bytes,)
        return predict(calibration, spec, cluster, self.overlaps, bucket_sizes, self.wire.link.host_layout is not None)

    def promising(self, calibration: Calibration, cluster: Cluster, limit_seconds: float) -> list[str]:
        """The fastest specs that would take less than the limit, if their coding cost nothing."""
        ways = [self.predict(calibration, spec, cluster) for spec in self.specs]
        fast = sorted((way for way in ways if way.seconds < limit_seconds), key=lambda way: way.seconds)
        return [way.spec for way in fast[:MOST_MEASURED]]

    def local_choices(self, calibration: Calibration, cluster: Cluster, period: float) -> Sequence[LocalAdvice]:
        """Local steps that were trained; none, if they would not pay against such steps even with free coding."""
        free = local_choices(calibration, cluster, self.predict, self.optimizer) or ()
        if to_take(free, STEPS * period) is None:
            return ()
        return local_choices(self.with_coding(calibration, MESSAGES), cluster, self.predict, self.optimizer) or ()

    def with_coding(self, calibration: Calibration, specs: Sequence[str]) -> Calibration:
        """The calibration with the coding costs of these specs, measured here."""
        draw = torch.Generator().manual_seed(0)
        setup, parameters = self.wire.setup, self.wire.parameters
        grads = {name: torch.randn(p.shape, generator=draw).to(p) for name, p in parameters.items()}
        plans = [self.model.plan(spec, setup.plan_world, setup.options.bucket_bytes) for spec in specs]
        times = [time_coding(plan, grads, repeats=2) for plan in plans]
        shared = iter(slowest(self.wire.link, [seconds for one in times for seconds in (one.encode, one.decode)]))
        measured = {spec: CodingCost(next(shared), next(shared)) for spec in specs}
        return replace(calibration, costs={spec: calibration.costs[spec] for spec in DENSE[:2]} | measured)

    def best(self, calibration: Calibration, cluster: Cluster) -> Prediction:
        """What is worth a trial."""
        return advise(calibration, cluster, self.specs, self.predict).trial
