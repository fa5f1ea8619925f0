"""Tuner: ``auto``. Decides, while a model trains, whether and how its gradients are compressed.

The first steps are dense. Then every rank knows how long a step takes, how much of that is waiting for the network,
and, after a short measurement of what might be faster, what compressing would cost here. The ranks share these figures,
so all decide alike, by the same costs as ``gradwire advise``. What was chosen is on trial for some steps: where it is
not faster than the dense steps were, dense training goes on. Under DDP, dense is DDP's own all-reduce, without our
hook unless there was one before.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from enum import Enum
from statistics import median
from typing import TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.comm.emulated import EmulatedBackend
from gradwire.comm.host_backend import HostBackend
from gradwire.comm.rates import LinkSpec
from gradwire.integrations.ddp import DDPHookState, attach
from gradwire.integrations.wire import Wire
from gradwire_lab.autotune.wire_costs import StepTimes, WireCosts
from gradwire_lab.perf_model.advice import ENOUGH
from gradwire_lab.perf_model.candidates import automatic
from gradwire_lab.perf_model.cluster import require_steady
from gradwire_lab.perf_model.local_steps import LocalAdvice, to_take
from gradwire_lab.perf_model.model import DENSE, ModelProfile
from gradwire_lab.perf_model.timing import now, slowest
from gradwire_lab.perf_model.training_time import STEPS

T = TypeVar("T")
WARMUP = 3  # steps that do not count: DDP rebuilds its buckets, kernels compile
MEASURED = 5  # steps whose median counts


@dataclass(frozen=True)
class Decision:
    """What was decided at a step, and why."""

    step: int
    spec: str
    why: str

    def __str__(self) -> str:
        return f"step {self.step}: {self.spec}, {self.why}"


class TuningStage(Enum):
    """What the tuner does with the next measurement."""

    DENSE = "weigh the dense steps"
    TRIAL = "compare a trial with the dense steps"
    DRAINING = "one dense step, in which all errors are sent"
    DECIDED = "nothing"


class AutoTuner:
    """Chooses the spec of a wire, which starts dense.

    Attributes:
        decisions: All so far.
    """

    def __init__(self, wire: Wire, ddp: DistributedDataParallel | None, link: LinkSpec | None) -> None:
        self.wire, self._ddp = wire, ddp
        self._described = None if link is None else require_steady(link)
        self.decisions: list[Decision] = []
        self._hook: DDPHookState | None = None
        self._chosen = "fp32"
        self._halves = False
        self._steps = 0
        self._dense_seconds = self._seconds = self._compute = 0.0
        self._rounds: Sequence[LocalAdvice] = ()
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
        return [*lines, *filter(None, [self.note(), self._local_steps()])]

    def _local_steps(self) -> str:
        """What to do where a step waits for the link in whatever way it is sent."""
        rounds = to_take(self._rounds, STEPS * self._seconds)
        if not self.decided or rounds is None:
            return ""
        times, gain = self._seconds / self._compute, STEPS * self._seconds / rounds.total_seconds
        return (
            f"auto: a step still takes {times:.3g} times its computing; with local steps, H = {rounds.lengths}, "
            f"{STEPS:,} steps are {gain:.2g} times faster, with {rounds.loss_text}: {rounds.call}"
        )

    def note(self) -> str:
        """What the report leaves out: steps that DDP takes without us."""
        if self._ddp is None or self.wire.link.world < 2 or self._emulates:
            return ""
        plain = ModelProfile.of(self.wire.parameters).format if self._hook is None else self._hook.dense_dtype
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
        began = now(self.wire.device)
        result = step()
        ended = now(self.wire.device)
        if self._last is not None:
            self._measured.append(StepTimes(ended - self._last, began - self._last, ended - began, ended - began))
        self._steps += 1
        self._consider()
        self._last = now(self.wire.device)
        return result

    def _before_step(self, module: nn.Module, inputs: object) -> None:
        """DDP is about to begin a step, on all ranks."""
        ddp = self._ddp
        assert ddp is not None
        if self.decided or not (ddp.training and torch.is_grad_enabled() and ddp.require_backward_grad_sync):
            return
        began = now(self.wire.device)
        if self._last is not None:
            self._steps += 1
            self._measured.append(_logged(ddp, began - self._last))
        self._consider()
        self._last = now(self.wire.device)

    def _consider(self) -> None:
        if len(self._measured) == self._wanted > 0:
            seen, self._measured = self._measured[-MEASURED:], []
            medians = [median(column) for column in zip(*map(astuple, seen), strict=True)]
            times = StepTimes(*slowest(self.wire.link, medians))
            if self._stage is TuningStage.DENSE:
                self._weigh(times)
            elif self._stage is TuningStage.TRIAL:
                self._judge_trial(times)
            else:
                self._halve("all errors have been sent")

    # -- deciding --------------------------------------------------------------------------------------------------

    def _weigh(self, dense: StepTimes) -> None:
        """After the dense steps: is there anything that pays?"""
        self._dense_seconds = self._seconds = dense.period
        self._compute = dense.period - dense.exposed
        costs = self._costs()
        self._halves = dense.exposed > 2 * (1 - ENOUGH) * dense.period and len(costs.model.dense) > 1
        calibration, cluster = costs.free_coding(dense), costs.cluster(dense)
        self._rounds = costs.local_choices(calibration, cluster, dense.period)
        promising = costs.promising(calibration, cluster, ENOUGH * dense.period)
        if not promising:
            self._halve(f"no way to compress would beat {_ms(dense.period)} a step, even if it cost nothing")
            return
        choice = costs.best(costs.with_coding(calibration, promising), cluster)
        if choice.spec in DENSE or choice.seconds > ENOUGH * dense.period:
            self._halve(f"no way to compress is surely faster than {_ms(dense.period)} a step")
            return
        expected = f"{_ms(choice.seconds)} a step expected, {_ms(dense.period)} dense"
        self._try(choice.spec, f"on trial: {expected}; {costs.evidence(choice.spec)}")

    def _costs(self) -> WireCosts:
        ddp_reduces = self._ddp is not None and self._hook is None
        return WireCosts(self.wire, self._ddp is not None and self.wire.scaler is None, ddp_reduces, self._described)

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
            self._hook.dense_dtype = torch.bfloat16  # type: ignore[union-attr]
        else:
            self.wire.set(spec)
        self._decide(TuningStage.TRIAL, WARMUP + MEASURED, why)

    def _judge_trial(self, seen: StepTimes) -> None:
        """After some steps in the chosen way: did it keep its promise?"""
        why = f"{_ms(seen.period)} a step measured, {_ms(self._dense_seconds)} dense"
        if seen.period < ENOUGH * self._dense_seconds:
            self._seconds = seen.period
            self._conclude(self._chosen, why)
        elif self._chosen == "bf16":
            self._conclude("fp32", f"back to float32: {why}")
        else:
            self.wire.off()  # for one step, in which all errors are sent
            self._chosen = "fp32"
            self._decide(TuningStage.DRAINING, 1, f"back to dense: {why}")

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
            self._hook.dense_dtype = ModelProfile.of(self.wire.parameters).format  # type: ignore[union-attr]
        else:
            self.wire.set("fp32", feedback="none")

    @property
    def _bypasses(self) -> bool:
        """Whether dense gradients travel as DDP sends them."""
        return self._hook is not None and not self._emulates

    # -- what is kept ----------------------------------------------------------------------------------------------

    def before_load(self, spec: str) -> None:
        """Continue in the way that was chosen before the state was saved; from a dense state, measure again."""
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


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.0f} ms" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def _logged(ddp: DistributedDataParallel, period: float) -> StepTimes:
    """What DDP itself logged of its last step, in nanoseconds."""
    log = ddp._get_ddp_logging_data()
    compute, comm, overlap = (
        log.get(f"backward_{name}_time", 0) / 1e9 for name in ("compute", "comm", "compute_comm_overlap")
    )
    exposed = min(max(0.0, comm - overlap), 0.99 * period)
    backward = min(compute, period - exposed) or (period - exposed) * 2 / 3
    return StepTimes(period, backward, exposed, comm)
