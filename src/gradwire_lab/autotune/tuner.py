"""Tuner: ``auto``. Decides, while a model trains, whether and how its gradients are compressed.

The first steps are dense. Then every rank knows how long a step takes, how much of that is waiting for the network,
and, after a short measurement of what might be faster, what compressing would cost here. The ranks share these figures,
so all decide alike, by the same costs as ``gradwire advise``. What was chosen is on trial for some steps: where it is
not faster than the dense steps were, dense training goes on. Under DDP, dense is DDP's own all-reduce, without our
hook unless there was one before.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from statistics import median
from typing import Any, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.comm.alphabeta import seconds as collective_seconds
from gradwire.comm.collectives import AllReduceOp
from gradwire.comm.emulated import EmulatedBackend
from gradwire.comm.host_backend import HostBackend
from gradwire.comm.host_layout import seated
from gradwire.comm.rates import LinkSpec
from gradwire.integrations.ddp import DDPHookState, attach
from gradwire.integrations.wire import Wire
from gradwire_lab.perf_model.accuracy_records import free_of_losses
from gradwire_lab.perf_model.advice import ENOUGH, Predict, advise
from gradwire_lab.perf_model.calibration import Calibration, CodingCost
from gradwire_lab.perf_model.candidates import automatic
from gradwire_lab.perf_model.cluster import Cluster, steady
from gradwire_lab.perf_model.costs import predict, predict_across
from gradwire_lab.perf_model.microbenchmark import time_coding
from gradwire_lab.perf_model.model import DENSE, ModelProfile
from gradwire_lab.perf_model.probe import delay_of, fitting

T = TypeVar("T")
WARMUP = 3  # steps that do not count: DDP rebuilds its buckets, kernels compile
MEASURED = 5  # steps whose median counts
REHEARSED = 4  # candidates at most that are worth a pause


@dataclass(frozen=True)
class Decision:
    """What was decided at a step, and why."""

    step: int
    spec: str
    why: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.spec}, {self.why}"


@dataclass(frozen=True)
class StepTimes:
    """The median step, in seconds, of the slowest rank."""

    period: float
    backward: float
    exposed: float
    comm: float


class TuningStage(Enum):
    """What the tuner does with the next measurement."""

    DENSE = "weigh the dense steps"
    TRIAL = "compare a trial with the dense steps"
    PAYING = "one dense step, in which all errors are sent"
    DECIDED = "nothing"


class AutoTuner:
    """Chooses the spec of a wire, which starts dense.

    Attributes:
        decisions: All so far.
    """

    def __init__(self, wire: Wire, ddp: DistributedDataParallel | None, link: LinkSpec | None) -> None:
        self.wire, self._ddp = wire, ddp
        self._described = None if link is None else steady(link)
        self.decisions: list[Decision] = []
        self._hook: DDPHookState | None = None
        self._chosen = "fp32"
        self._halves = False
        self._steps = 0
        self._dense_seconds = 0.0
        self._measured: list[StepTimes] = []
        self._last: float | None = None
        self._stage, self._wanted = TuningStage.DENSE, WARMUP + MEASURED
        self._begin()

    def _begin(self) -> None:
        if self.wire.link.world < 2:
            self._conclude("fp32", "there is no other rank")
        elif self._ddp is not None:
            if self._emulates:  # DDP's own all-reduces would not be slowed down
                self._hook = attach(self.wire, self._ddp)
            self._ddp._set_ddp_runtime_logging_sample_rate(1)
            ahead = torch.compiler.disable(self._before_step) if "torch._dynamo" in sys.modules else self._before_step
            self._handle = self._ddp.register_forward_pre_hook(ahead)

    @property
    def decided(self) -> bool:
        """Whether the choice is final."""
        return self._stage is TuningStage.DECIDED

    def lines(self) -> list[str]:
        """The decisions, for people."""
        lines = [f"auto: {decision}" for decision in self.decisions] or ["auto: still measuring dense steps"]
        return [*lines, *filter(None, [self.note()])]

    def note(self) -> str:
        """What the report leaves out: steps that DDP takes without us."""
        if self._ddp is None or self.wire.link.world < 2 or self._emulates:
            return ""
        plain = ModelProfile.of(self.wire.parameters).format if self._hook is None else self._hook.plain
        if plain is None:
            return (
                "the dense steps before used DDP's own all-reduce; their bytes are not counted" if self._steps else ""
            )
        kind = str(plain).removeprefix("torch.")
        return f"these steps use DDP's own all-reduce in {kind}; their bytes are not counted"

    # -- watching --------------------------------------------------------------------------------------------------

    def measure(self, step: Callable[[], T]) -> T:
        """Run a step of a plain loop, and measure it."""
        if self._ddp is not None or self.decided:
            return step()
        began = self._now()
        result = step()
        ended = self._now()
        if self._last is not None:
            self._measured.append(StepTimes(ended - self._last, began - self._last, ended - began, ended - began))
        self._steps += 1
        self._consider()
        self._last = self._now()
        return result

    def _before_step(self, module: nn.Module, inputs: object) -> None:
        """DDP is about to begin a step, on all ranks."""
        ddp = self._ddp
        assert ddp is not None
        if self.decided or not (ddp.training and torch.is_grad_enabled() and ddp.require_backward_grad_sync):
            return
        now = self._now()
        if self._last is not None:
            self._steps += 1
            self._measured.append(self._logged(ddp, now - self._last))
        self._consider()
        self._last = self._now()

    def _logged(self, ddp: DistributedDataParallel, period: float) -> StepTimes:
        """What DDP itself noted of its last step, in nanoseconds."""
        told = ddp._get_ddp_logging_data()
        compute, comm, overlap = (
            told.get(f"backward_{name}_time", 0) / 1e9 for name in ("compute", "comm", "compute_comm_overlap")
        )
        exposed = min(max(0.0, comm - overlap), 0.99 * period)
        backward = min(compute, period - exposed) or (period - exposed) * 2 / 3
        return StepTimes(period, backward, exposed, comm)

    def _now(self) -> float:
        if self.wire.device.type == "cuda":
            torch.cuda.synchronize(self.wire.device)
        return time.perf_counter()

    def _consider(self) -> None:
        if len(self._measured) == self._wanted > 0:
            seen, self._measured = self._measured[-MEASURED:], []
            columns = zip(*((one.period, one.backward, one.exposed, one.comm) for one in seen), strict=True)
            times = StepTimes(*self._agreed_on([median(column) for column in columns]))
            {TuningStage.DENSE: self._weigh, TuningStage.TRIAL: self._judge_trial, TuningStage.PAYING: self._settled}[
                self._stage
            ](times)

    def _agreed_on(self, mine: Sequence[float]) -> list[float]:
        """The largest of all ranks' figures: the same everywhere, so that all decide alike."""
        told = torch.tensor(list(mine), dtype=torch.float64, device=self.wire.link.device)
        found: list[float] = self.wire.link.move(AllReduceOp(told, "max")).tolist()
        return found

    # -- deciding --------------------------------------------------------------------------------------------------

    def _weigh(self, seen: StepTimes) -> None:
        """After the dense steps: is there anything that pays?"""
        self._dense_seconds = seen.period
        model = ModelProfile.of(self.wire.parameters)
        forward = max(0.0, seen.period - seen.backward - seen.exposed)
        cluster = self._cluster(model, seen)
        free = {spec: CodingCost(0.0, 0.0) for spec in (*DENSE[:2], *free_of_losses(automatic()))}
        calibration = Calibration(model, forward, seen.backward, free, self._cores(), world=self.wire.setup.parties)
        self._halves = seen.exposed > 2 * (1 - ENOUGH) * seen.period and len(model.dense) > 1
        promising = self._promising(calibration, cluster, seen)
        if not promising:
            self._halve(f"no way to compress would beat {_ms(seen.period)} a step, even if it cost nothing")
            return
        costs = {**{spec: free[spec] for spec in DENSE[:2]}, **self._rehearsed(model, promising)}
        self._choose(replace(calibration, costs=costs), cluster)

    def _promising(self, calibration: Calibration, cluster: Cluster, seen: StepTimes) -> list[str]:
        ways = [self._predict(calibration, spec, cluster) for spec in free_of_losses(automatic())]
        fast = sorted((way for way in ways if way.seconds < ENOUGH * seen.period), key=lambda way: way.seconds)
        return [way.spec for way in fast[:REHEARSED]]

    def _rehearsed(self, model: ModelProfile, specs: Sequence[str]) -> dict[str, CodingCost]:
        draw = torch.Generator().manual_seed(0)
        setup, parameters = self.wire.setup, self.wire.parameters
        grads = {name: torch.randn(p.shape, generator=draw).to(p) for name, p in parameters.items()}
        plans = [model.plan(spec, setup.parties, setup.options.launch_bytes) for spec in specs]
        found = [time_coding(plan, grads, repeats=2) for plan in plans]
        shared = iter(self._agreed_on([seconds for one in found for seconds in (one.encode, one.decode)]))
        return {spec: CodingCost(next(shared), next(shared)) for spec in specs}

    def _choose(self, calibration: Calibration, cluster: Cluster) -> None:
        choice = advise(calibration, cluster, free_of_losses(automatic()), self._predict).trial
        if choice.spec in DENSE or choice.seconds > ENOUGH * self._dense_seconds:
            self._halve(f"no way to compress is surely faster than {_ms(self._dense_seconds)} a step")
            return
        self._try(choice.spec, f"on trial: {_ms(choice.seconds)} a step expected, {_ms(self._dense_seconds)} dense")

    def _halve(self, why: str) -> None:
        """Dense it is; in bfloat16, if float32 waits long enough for the network to make that worth a trial."""
        if self._halves:
            self._halves = False
            self._try("bf16", f"{why}; on trial")
        else:
            self._conclude("fp32", why)

    def _try(self, spec: str, why: str) -> None:
        """Go on in another way, from this step on."""
        self._chosen = spec
        if self._ddp is not None and self._hook is None:
            self._hook = attach(self.wire, self._ddp)
        if spec == "bf16" and self._bypasses:
            self._hook.plain = torch.bfloat16  # type: ignore[union-attr]
        else:
            self.wire.set(spec)
        self._decide(TuningStage.TRIAL, WARMUP + MEASURED, why)

    def _judge_trial(self, seen: StepTimes) -> None:
        """After some steps in the chosen way: did it keep its promise?"""
        why = f"{_ms(seen.period)} a step measured, {_ms(self._dense_seconds)} dense"
        if seen.period < ENOUGH * self._dense_seconds:
            self._conclude(self._chosen, why)
        elif self._chosen == "bf16":
            self._conclude("fp32", f"back to float32: {why}")
        else:
            self.wire.off()  # for one step, in which all that is owed is paid
            self._chosen = "fp32"
            self._decide(TuningStage.PAYING, 1, f"back to dense: {why}")

    def _settled(self, seen: StepTimes) -> None:
        self._halve("all errors have been sent")

    def _decide(self, stage: TuningStage, wanted: int, why: str) -> None:
        self._stage, self._wanted = stage, wanted
        self.decisions.append(Decision(self._steps, self._chosen, why))

    def _conclude(self, spec: str, why: str) -> None:
        """The end of all measuring."""
        self._chosen = spec
        self._decide(TuningStage.DECIDED, 0, why)
        if self.wire.link.world < 2:
            return
        if self._ddp is not None:
            self._handle.remove()
            self._ddp._set_ddp_runtime_logging_sample_rate(100)
        if spec != "fp32" or len(self.decisions) == 1:
            return
        if self._bypasses:
            self._hook.plain = ModelProfile.of(self.wire.parameters).format  # type: ignore[union-attr]
        else:
            self.wire.set("fp32", feedback="none")

    @property
    def _bypasses(self) -> bool:
        """Whether dense gradients travel as DDP sends them."""
        return self._hook is not None and not self._emulates

    # -- what is kept ----------------------------------------------------------------------------------------------

    def before_load(self, spec: str) -> None:
        """Go on in the way that was chosen before the state was saved; from a dense state, measure anew."""
        candidates = ("bf16", *automatic())
        chosen = next((one for one in candidates if self.wire.setup.text_of(one) == spec), None)
        if chosen is not None and not self.decided:
            self._try(chosen, "it was chosen before")
            self._conclude(chosen, "it was chosen before")

    # -- circumstances ---------------------------------------------------------------------------------------------

    @property
    def _emulates(self) -> bool:
        """Whether what is carried takes longer than it would by itself, which DDP's own sums would not."""
        way = self.wire.link.between if isinstance(self.wire.link, HostBackend) else self.wire.link
        return isinstance(way, EmulatedBackend)

    @property
    def _predict(self) -> Predict:
        across = self.wire.link.grouping is not None
        overlaps = self._ddp is not None and self.wire.scaler is None

        def predicted(calibration: Calibration, spec: str, cluster: Cluster) -> Any:
            way = predict_across if across else predict
            return way(calibration, spec, cluster, overlaps, (self.wire.setup.options.launch_bytes,))

        return predicted

    def _cluster(self, model: ModelProfile, seen: StepTimes) -> Cluster:
        beside = 1 if self.wire.link.grouping is None else self.wire.link.grouping.beside
        link = self._described or fitting(seen.comm, delay_of(self.wire.link), partial(self._summing, model))
        return Cluster(self.wire.link.world, link, beside)

    def _summing(self, model: ModelProfile, link: LinkSpec) -> float:
        """How long the dense sums of a step take on a link: DDP's own, or those of this wire."""
        own, setup = self._ddp is None or self._hook is not None, self.wire.setup
        spec, world = ("fp32", setup.parties) if own else (DENSE[0], self.wire.link.world)
        buckets = model.buckets(spec, world, setup.options.launch_bytes)
        sums = (call.nbytes for bucket in buckets for call in bucket.calls)
        return sum(collective_seconds("all_reduce", nbytes, world, link) for nbytes in sums)

    def _cores(self) -> float:
        """Processors for each thread that computes, on the host that has fewest; all ranks ask at once."""
        return -self._agreed_on([-_cores(self.wire.device)])[0]


def _cores(device: torch.device) -> float:
    """The same on this host; a GPU does one thing after the other."""
    if device.type == "cuda":
        return 1.0
    place = seated(os.environ)
    beside = place[1] if place is not None else 1
    return (os.cpu_count() or 1) / beside / torch.get_num_threads()


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"
